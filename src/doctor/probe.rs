//! The child's side: opens the driver, runs the trials that it reads, and writes one answer per line.

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

use crate::capability::{Capabilities, Trial};
use crate::driver::{HandleTypes, Location};
use crate::part::{Ask, Said};
use crate::{Answer, Driver, Error, InProcess, Libraries, Prober, Reason, Result};

/// The prefix of the child's own lines: libraries may print others.
pub(crate) const MARK: &str = "egmem-probe ";

/// The prefix of the line with the child's libraries, before the first answer.
pub(crate) const LIBRARIES: &str = "egmem-libraries ";

/// What a child is asked: one JSON array.
#[derive(Deserialize)]
#[serde(untagged)]
enum Questions {
    Trials(Vec<Trial>),
    /// The decisions of `Backing::Auto`.
    Sites(Vec<(Location, HandleTypes)>),
    /// Parts of a survey.
    Parts(Vec<Ask>),
}

/// Answers the questions of the parent's [`Children`](crate::Children), in its child process.
///
/// Reads one JSON array from standard input, of trials, of places to decide for or of parts of a
/// [`Survey`](crate::Survey). Opens the driver with `open`, and writes
/// to standard output: first the libraries that answer for the driver, whether it opens, then an answer per element, each as
/// JSON on a line of its own. Calls `before` for each trial. Returns the number of answers.
///
/// # Errors
/// [`Error::System`] for the pipes, and [`Error::InvalidArgument`] for another text than such an array. A driver
/// that does not open is an answer.
pub fn answer_trials(
    open: impl FnOnce() -> Result<Driver>,
    mut before: impl FnMut(&Trial),
) -> Result<usize> {
    let fail = |error: io::Error| Error::system("the probe's pipe", &error);
    let mut text = String::new();
    io::stdin().read_to_string(&mut text).map_err(fail)?;
    let questions: Questions =
        serde_json::from_str(&text).map_err(|error| Error::invalid("trials", error.to_string()))?;
    let opened = open();
    tell(LIBRARIES, &Libraries::of_this_process()).map_err(fail)?;
    let driver = match opened {
        Ok(driver) => driver,
        Err(error) => {
            let reason = Reason::from(error);
            say(&Answer::No { reason }).map_err(fail)?;
            return Ok(0);
        }
    };
    say(&Answer::Yes).map_err(fail)?;
    let mut prober = InProcess(Capabilities::of(&driver));
    match questions {
        Questions::Trials(trials) => {
            for trial in &trials {
                before(trial);
                say(&prober.0.trial(*trial).into()).map_err(fail)?;
            }
            Ok(trials.len())
        }
        Questions::Sites(sites) => {
            let decisions = prober.choose_all(&sites);
            decisions
                .iter()
                .try_for_each(|decision| tell(MARK, decision))
                .map_err(fail)?;
            Ok(decisions.len())
        }
        Questions::Parts(parts) => {
            for ask in &parts {
                ask.answer(&driver, &mut |said| tell(MARK, &said).map_err(fail))?;
                tell(MARK, &Said::End).map_err(fail)?;
            }
            Ok(parts.len())
        }
    }
}

fn say(answer: &Answer) -> io::Result<()> {
    tell(MARK, answer)
}

fn tell(mark: &str, value: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_string(value)?;
    let mut out = io::stdout().lock();
    writeln!(out, "{mark}{text}")?;
    out.flush()
}
