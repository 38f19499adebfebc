//! Trials in child processes, so that a crash of the driver ends only them: the parent's side and the child's.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fmt;
use std::io::{self, Write};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::backing::Chosen;
use crate::capability::{Capabilities, Path, Trial};
use crate::child::Guarded;
use crate::driver::{HandleTypes, Location};
use crate::part::{Ask, Said};
use crate::{Answer, Driver, Error, InProcess, Libraries, Prober, Reason, Result};

/// Runs each batch of trials in a child process; after a crash, runs each remaining trial in a child of its own.
///
/// The child's program calls [`answer_trials`](crate::answer_trials). A child that does not answer in time is killed.
///
/// ```no_run
/// use std::time::Duration;
/// use egmem::doctor::{Children, Report, to_text};
///
/// let command = ["/usr/bin/egmem", "probe"].map(Into::into).to_vec();
/// let mut children = Children::new(command, Duration::from_secs(30));
/// print!("{}", to_text(&Report::gather(&mut children), false, false));
/// ```
pub struct Children {
    /// The program and its arguments.
    command: Vec<OsString>,
    /// How long a child may take to open the driver, for each trial, and to exit.
    patience: Duration,
    /// Trials that hung when run alone: they are not repeated elsewhere, to save time.
    hung: HashSet<(Path, HandleTypes)>,
    /// Called with a text before each batch, and with none after it.
    progress: Box<dyn FnMut(&str) + Send>,
    /// Those of the child that opened the driver last.
    libraries: Libraries,
}

impl fmt::Debug for Children {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Children")
            .field("command", &self.command)
            .field("patience", &self.patience)
            .finish_non_exhaustive()
    }
}

impl Prober for Children {
    fn open(&mut self) -> Result<(), Reason> {
        let (_, problem) = self.run::<Trial, Answer>("opening the driver", &[]);
        problem.map_or(Ok(()), |problem| Err(problem.reason("the driver")))
    }

    fn libraries(&self) -> Libraries {
        self.libraries.clone()
    }

    fn try_all(&mut self, trials: &[Trial]) -> Vec<Answer> {
        let what = trials.first().map_or(String::new(), |trial| {
            format!("trying {} memory on {}", trial.path, trial.location)
        });
        let mut fresh = trials.to_vec();
        fresh.retain(|trial| !self.has_hung(trial));
        let (answered, _) = self.run(&what, &fresh);
        let mut answered = answered.into_iter();
        let mut answer = |trial| {
            if self.has_hung(trial) {
                let died = Problem::Died("not tried here, because it hung elsewhere".into());
                let reason = died.reason(&subject(trial));
                return Answer::Unknown { reason };
            }
            let answer = answered.next();
            answer.unwrap_or_else(|| self.try_alone(&what, trial))
        };
        trials.iter().map(&mut answer).collect()
    }

    fn choose_all(&mut self, sites: &[(Location, HandleTypes)]) -> Vec<Result<Chosen, Reason>> {
        let what = sites.first().map_or(String::new(), |(location, _)| {
            format!("trying registered memory on {location}")
        });
        let (mut answers, problem) = self.run(&what, sites);
        if let Some(problem) = problem {
            answers.resize(sites.len(), Err(problem.reason("registered memory")));
        }
        answers
    }
}

impl Children {
    /// Runs children of `command`, a program and its arguments. A child may take `patience` to open the driver, for
    /// each trial, and to exit.
    pub fn new(command: Vec<OsString>, patience: Duration) -> Self {
        Self {
            command,
            patience,
            hung: HashSet::new(),
            progress: Box::new(|_| ()),
            libraries: Libraries::default(),
        }
    }

    /// Calls `progress` with a text before each batch, and with an empty one after it.
    pub fn on_progress(mut self, progress: impl FnMut(&str) + Send + 'static) -> Self {
        self.progress = Box::new(progress);
        self
    }

    /// Runs a part of a survey in a child, which is killed after `limit`. `take` gets what it says.
    pub(crate) fn run_part(
        &mut self,
        ask: &Ask,
        limit: Duration,
        mut take: impl FnMut(Said),
    ) -> Result<(), Reason> {
        if limit.is_zero() {
            let error = Error::failed(ask.part.to_string(), "not done: the time was used up");
            return Err(error.into());
        }
        let until = Instant::now() + limit;
        let left = || until.saturating_duration_since(Instant::now());
        let what = format!("survey: {}", ask.part);
        let done = self.ask(&what, std::slice::from_ref(ask), left(), |child| {
            loop {
                child.patience = left();
                // Also if the child says something all the time.
                if left().is_zero() {
                    return Err(Problem::Hung(limit));
                }
                match child.next()? {
                    Said::End => return Ok(()),
                    said => take(said),
                }
            }
        });
        done.map_err(|problem| match problem {
            Problem::Hung(_) => Problem::Hung(limit).reason(&ask.part.to_string()),
            problem => problem.reason(&ask.part.to_string()),
        })
    }

    fn has_hung(&self, trial: &Trial) -> bool {
        self.hung.contains(&(trial.path, trial.handle_types))
    }

    fn try_alone(&mut self, what: &str, trial: &Trial) -> Answer {
        let (mut answers, problem) = self.run(what, std::slice::from_ref(trial));
        let Some(problem) = problem else {
            return answers.remove(0);
        };
        if matches!(problem, Problem::Hung(_)) {
            self.hung.insert((trial.path, trial.handle_types));
        }
        let reason = problem.reason(&subject(trial));
        Answer::No { reason }
    }

    /// Runs a child. Returns an answer for each question; fewer only with the problem why they are missing or may be wrong.
    fn run<Q: Serialize, A: DeserializeOwned>(
        &mut self,
        what: &str,
        questions: &[Q],
    ) -> (Vec<A>, Option<Problem>) {
        let mut answers = Vec::with_capacity(questions.len());
        let done = self.ask(what, questions, self.patience, |child| {
            for _ in questions {
                answers.push(child.next()?);
            }
            Ok(())
        });
        let problem = done.err();
        let (asked, answered) = (questions.len(), answers.len());
        tracing::info!(asked, answered, ?problem, "a child has ended");
        if problem.is_some() && asked == answered {
            // The child died at its end, so any question may be the cause.
            answers.clear();
        }
        (answers, problem)
    }

    /// Runs a child that opens the driver, and then says what `listen` takes. Tells of it as `what`.
    fn ask(
        &mut self,
        what: &str,
        questions: &[impl Serialize],
        patience: Duration,
        listen: impl FnOnce(&mut Guarded) -> Result<(), Problem>,
    ) -> Result<(), Problem> {
        (self.progress)(what);
        let done = Guarded::start(&self.command, questions, patience).and_then(|mut child| {
            let opened: Opened = child.next()?;
            self.libraries = opened.libraries;
            if let Some(problem) = opened.problem {
                return Err(Problem::Refused(problem));
            }
            listen(&mut child)?;
            match child.end()? {
                status if status.success() => Ok(()),
                status => Err(child.died(status)),
            }
        });
        (self.progress)("");
        done
    }
}

/// Names a trial without node and GPU, so that the same failure has the same text everywhere.
fn subject(trial: &Trial) -> String {
    format!(
        "{} memory (handle types: {})",
        trial.path, trial.handle_types
    )
}

#[derive(Debug)]
pub(crate) enum Problem {
    /// The driver cannot be opened.
    Refused(Reason),
    /// The child exited, or never started.
    Died(String),
    /// The child did not answer in this time.
    Hung(Duration),
}

impl Problem {
    fn reason(self, what: &str) -> Reason {
        let how = match self {
            Self::Refused(reason) => return reason,
            Self::Died(how) => how,
            Self::Hung(patience) => format!("no answer within {patience:?}, so it was stopped"),
        };
        let what = what.to_owned();
        Error::ProbeDied { what, how }.into()
    }
}

/// The prefix of the child's own lines: libraries may print others.
pub(crate) const MARK: &str = "egmem-probe ";

/// What a child says first.
#[derive(Serialize, Deserialize)]
struct Opened {
    /// The libraries that answer for the driver.
    libraries: Libraries,
    /// Why the driver does not open.
    problem: Option<Reason>,
}

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
/// to standard output: first the libraries that answer for the driver and whether it opens, then an answer per element, each as
/// JSON on a line of its own. Calls `before` for each trial. Returns the number of answers.
///
/// # Errors
/// [`Error::System`] for the pipes, and [`Error::InvalidArgument`] for another text than such an array. A driver
/// that does not open is an answer.
pub fn answer_trials(
    open: impl FnOnce() -> Result<Driver>,
    mut before: impl FnMut(&Trial),
) -> Result<usize> {
    let text = io::read_to_string(io::stdin()).map_err(of_pipe)?;
    let questions: Questions =
        serde_json::from_str(&text).map_err(|error| Error::invalid("trials", error.to_string()))?;
    let opened = open();
    tell(&Opened {
        libraries: Libraries::of_this_process(),
        problem: opened.as_ref().err().map(Reason::from),
    })?;
    let Ok(driver) = opened else { return Ok(0) };
    let mut prober = InProcess(Capabilities::of(&driver));
    match questions {
        Questions::Trials(trials) => {
            for trial in &trials {
                before(trial);
                tell(&Answer::from(prober.0.trial(*trial)))?;
            }
            Ok(trials.len())
        }
        Questions::Sites(sites) => {
            let decisions = prober.choose_all(&sites);
            decisions.iter().try_for_each(tell)?;
            Ok(decisions.len())
        }
        Questions::Parts(parts) => {
            for ask in &parts {
                ask.answer(&driver, &mut |said| tell(&said))?;
                tell(&Said::End)?;
            }
            Ok(parts.len())
        }
    }
}

fn of_pipe(error: io::Error) -> Error {
    Error::system("the probe's pipe", &error)
}

/// Writes a value on a line of its own.
fn tell<T: Serialize>(value: &T) -> Result<()> {
    let text = serde_json::to_string(value).map_err(|error| of_pipe(error.into()))?;
    let mut out = io::stdout().lock();
    let written = writeln!(out, "{MARK}{text}").and_then(|()| out.flush());
    written.map_err(of_pipe)
}
