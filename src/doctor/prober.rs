//! Trials and their answers, as a report has them and a child process tells them.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::backing::choose::choose;
use crate::backing::{Backing, Chosen};
use crate::capability::{Capabilities, Support, Trial};
use crate::driver::{Call, Code, HandleTypes, Location};
use crate::errors::RUN_DOCTOR;
use crate::{Error, Explained, Result};

/// The result of a trial, as text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum Answer {
    /// It works.
    Yes,
    /// It does not.
    No {
        /// The reason, and what to do.
        reason: Reason,
    },
    /// The trial was inconclusive.
    Unknown {
        /// The reason, and what to do.
        reason: Reason,
    },
}

impl Answer {
    /// Returns whether it works.
    pub const fn is_yes(&self) -> bool {
        matches!(self, Self::Yes)
    }

    /// Returns the reason why it does not work or why that is unknown.
    pub const fn reason(&self) -> Option<&Reason> {
        match self {
            Self::Yes => None,
            Self::No { reason } | Self::Unknown { reason } => Some(reason),
        }
    }
}

impl From<Support> for Answer {
    fn from(support: Support) -> Self {
        match support {
            Support::Yes => Self::Yes,
            Support::No(error) => Self::No {
                reason: error.into(),
            },
            Support::Unknown(error) => Self::Unknown {
                reason: error.into(),
            },
        }
    }
}

/// Runs trials, in this process or in others, to survive a driver that crashes.
pub trait Prober {
    /// Opens the driver once, as a trial would, to check that the process survives it.
    ///
    /// # Errors
    /// As text, those of [`Driver::open`](egmem_core::Driver::open), and
    /// [`Error::ProbeDied`](Error::ProbeDied).
    fn open(&mut self) -> Result<(), Reason>;

    /// Returns the libraries of the process that [`open`](Self::open) opened the driver in, as far as they are known.
    fn libraries(&self) -> Libraries {
        Libraries::of_this_process()
    }

    /// Runs all of `trials`, which share one location and path. Returns one answer each, in order.
    fn try_all(&mut self, trials: &[Trial]) -> Vec<Answer>;

    /// Decides for [`Backing::Auto`] at each location with these handle types, for memory that is open to the CPU and all
    /// GPUs. Returns one decision each, in order, or why there is none.
    fn choose_all(&mut self, sites: &[(Location, HandleTypes)]) -> Vec<Result<Chosen, Reason>>;
}

/// Runs trials in this process: a crash ends the process.
#[derive(Clone, Debug)]
pub struct InProcess(pub Capabilities);

impl Prober for InProcess {
    fn open(&mut self) -> Result<(), Reason> {
        Ok(())
    }

    fn try_all(&mut self, trials: &[Trial]) -> Vec<Answer> {
        let answer = |&trial| self.0.trial(trial).into();
        trials.iter().map(answer).collect()
    }

    fn choose_all(&mut self, sites: &[(Location, HandleTypes)]) -> Vec<Result<Chosen, Reason>> {
        let choose = |&site| choose(self.0.driver(), Backing::Auto, site, &[]);
        let chosen = sites.iter().map(choose);
        chosen.map(|chosen| chosen.map_err(Reason::from)).collect()
    }
}

/// One trial with its answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tried {
    /// The trial.
    #[serde(flatten)]
    pub trial: Trial,
    /// Its result.
    #[serde(flatten)]
    pub answer: Answer,
}

/// Why something does not work, and what to do: an [`Error`] as text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reason {
    /// The name of the [`Error`]'s variant, such as `NoImexChannel`.
    pub kind: String,
    /// The failure and its cause.
    pub message: String,
    /// The remedy.
    pub remedy: String,
    /// The failed driver call behind it, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call: Option<Call>,
    /// The call's result code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<Code>,
}

impl From<&Error> for Reason {
    fn from(error: &Error) -> Self {
        // Derived `Debug` output starts with the variant's name.
        let mut kind = format!("{error:?}");
        if let Some(end) = kind.find(|c: char| !c.is_ascii_alphanumeric()) {
            kind.truncate(end);
        }
        let source = error.driver_error();
        let remedy = in_report(error).to_owned();
        Self {
            kind,
            message: Explained(error).message(),
            remedy,
            call: source.map(|source| source.call),
            code: source.map(|source| source.code),
        }
    }
}

/// Returns an error's remedy, without the advice to run the doctor, which shows it.
fn in_report(error: &Error) -> &'static str {
    match (error, error.remedy()) {
        (Error::PlatformUnsupported { .. }, _) => "use a path that this report answers with yes",
        (_, RUN_DOCTOR) => {
            "look the code up in the documentation of the CUDA driver API, and look for NVRM and Xid in the kernel's \
             log (dmesg)"
        }
        (_, remedy) => match remedy.split_once(" (`egmem doctor` shows") {
            Some((remedy, _)) => remedy,
            None => remedy,
        },
    }
}

impl From<Error> for Reason {
    fn from(error: Error) -> Self {
        Self::from(&error)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.message, self.remedy)
    }
}

/// The libraries in the address space of a process that has opened the driver.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Libraries {
    /// The driver library's file.
    #[serde(rename = "library")]
    pub driver: Option<String>,
    /// The files of libraries that share GPUs between containers and answer driver calls in the driver's place:
    /// `libvgpu.so`.
    pub shims: Vec<String>,
}

impl Libraries {
    /// Finds the libraries of this process. Source: `/proc/self/maps`.
    pub fn of_this_process() -> Self {
        let maps = std::fs::read("/proc/self/maps").unwrap_or_default();
        Self::of_maps(&String::from_utf8_lossy(&maps))
    }

    fn of_maps(maps: &str) -> Self {
        let named = |name: &str| {
            let paths = maps.lines();
            let paths = paths.filter_map(|line| line.find('/').map(|at| &line[at..]));
            let is_it = |path: &&str| {
                path.rsplit('/')
                    .next()
                    .is_some_and(|file| file.starts_with(name))
            };
            let mut named: Vec<String> = paths.filter(is_it).map(str::to_owned).collect();
            named.dedup();
            named
        };
        Self {
            driver: named("libcuda.so").into_iter().next(),
            shims: named("libvgpu.so"),
        }
    }

    /// Returns the driver library's file, its folder, and the version in its name, if it has one.
    pub(crate) fn driver_file(&self) -> Option<(&str, &str, Option<&str>)> {
        let path = self.driver.as_deref()?;
        let (folder, file) = path.rsplit_once('/')?;
        let version = file.strip_prefix("libcuda.so.");
        let version = version.filter(|version| version.contains('.'));
        Some((path, folder, version))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_says_what_the_error_says() {
        let error = Error::PlatformUnsupported {
            what: "fabric handles",
            source: Some(egmem_core::DriverError {
                call: Call::MemCreate,
                code: Code::NOT_SUPPORTED,
            }),
        };
        let reason = Reason::from(&error);
        assert_eq!(reason.kind, "PlatformUnsupported");
        assert_eq!(
            reason.message,
            "this platform does not support fabric handles \
             (cuMemCreate failed: CUDA_ERROR_NOT_SUPPORTED (801))"
        );
        assert_eq!(reason.code, Some(Code::NOT_SUPPORTED));
        assert!(reason.to_string().starts_with(&Explained(&error).message()));

        let unit = Reason::from(Error::driver(Call::MemCreate, Code(4242)));
        assert_eq!(unit.kind, "Driver");
        assert_eq!(unit.message, "cuMemCreate failed: unknown code 4242");
    }

    #[test]
    fn no_remedy_in_a_report_is_to_run_the_doctor() {
        let codes = (0..1000).map(Code);
        let errors = codes.map(|code| Error::driver(Call::Init, code));
        let unsupported = Error::unsupported("fabric handles", None);
        for error in errors.chain([unsupported]) {
            let reason = Reason::from(error);
            assert!(!reason.remedy.contains("egmem doctor"), "{reason}");
        }
    }

    #[test]
    fn libraries_are_found_by_the_names_of_their_files() {
        let maps = "\
7f10-7f20 r-xp 0 08:01 5  /usr/lib/libvgpu.so.d/libc.so.6
7f20-7f30 r--p 0 08:01 7  /usr/local/vgpu/libvgpu.so
7f30-7f40 r-xp 0 08:01 7  /usr/local/vgpu/libvgpu.so
7f40-7f50 rw-p 0 00:00 0
7f50-7f60 r-xp 0 08:01 9  /usr/local/cuda/compat/libcuda.so.560.28.03
7f60-7f70 r-xp 0 08:01 8  /usr/lib/libcuda.so.580.1
";
        let found = Libraries::of_maps(maps);
        assert_eq!(found.shims, ["/usr/local/vgpu/libvgpu.so"]);
        let folder = "/usr/local/cuda/compat";
        let path = format!("{folder}/libcuda.so.560.28.03");
        assert_eq!(
            found.driver_file(),
            Some((&*path, folder, Some("560.28.03")))
        );
        let none = Libraries::of_maps("");
        assert_eq!((&none, none.driver_file()), (&Libraries::default(), None));
    }
}
