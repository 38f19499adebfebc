//! The report about a simulated machine.

use super::{DriverFacts, Prober, Report, advice};
use crate::capability::ImexChannel;
use crate::{Driver, Machine};

impl Report {
    /// Collects everything about a machine that is simulated. `prober` opens its driver first, as in
    /// [`gather`](Self::gather).
    pub fn gather_simulated(prober: &mut dyn Prober, machine: &Machine) -> Self {
        let mut report = Self::without_advice(prober, || Driver::simulated(machine.clone()));
        report.simulated = Some(machine.name.clone());
        // As far as they are known without a driver.
        report.imex = ImexChannel::Simulated {
            present: machine.imex_channel,
        };
        report.driver = DriverFacts {
            cuda: report.driver.cuda,
            problem: report.driver.problem,
            ..DriverFacts::of_this_machine(true)
        };
        report.advice = advice::advise(&report);
        report
    }
}
