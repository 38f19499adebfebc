//! Chooses one handle type for all ranks, or collects each rank's reason against it; a pure function.

use serde::{Deserialize, Serialize};

use crate::driver::HandleType;
use crate::share::{BootId, Description};
use crate::text::bounded;

/// The most reasons that are passed on, and the most bytes of each. People read them.
const REASONS: usize = 64;
const REASON_BYTES: usize = 256;

/// What a rank states before any handle is made.
#[derive(Serialize, Deserialize)]
pub(super) struct Statement {
    /// Of this protocol.
    pub version: u32,
    pub rank: u32,
    pub size: u32,
    /// Its machine.
    pub boot: BootId,
    /// Its memory; `None` if it only maps the others'.
    pub memory: Option<Description>,
    /// Why it cannot use fabric handles; `None` if it can.
    pub no_fabric: Option<String>,
    /// Why it cannot use fds; `None` if it can.
    pub no_fds: Option<String>,
    /// Where processes of its machine get its fds, if it has memory and can use them.
    pub socket: Option<String>,
}

/// Returns the handle type that all ranks use: fds if all are on one machine, can use them and can reach each other, else
/// fabric if every rank can. `unreachable` has the ranks that cannot reach another one's socket, with the reasons.
///
/// # Errors
/// Otherwise the reasons, as stated by each rank that prevents the choice.
pub(super) fn agree(
    ranks: &[Statement],
    unreachable: &[String],
) -> Result<HandleType, Vec<String>> {
    let one_machine = ranks.windows(2).all(|pair| pair[0].boot == pair[1].boot);
    let fds = ranks.iter().all(|rank| rank.no_fds.is_none());
    if one_machine && fds && unreachable.is_empty() {
        return Ok(HandleType::PosixFd);
    }
    if ranks.iter().all(|rank| rank.no_fabric.is_none()) {
        return Ok(HandleType::Fabric);
    }
    let mut reasons = Vec::new();
    if !one_machine {
        reasons
            .push("the ranks are on more than one machine, so POSIX fds cannot be passed".into());
    }
    for (index, rank) in ranks.iter().enumerate() {
        let mut lacks = Vec::new();
        if let Some(why) = &rank.no_fabric {
            lacks.push(format!("no fabric ({})", cut(why)));
        }
        if let Some(why) = rank.no_fds.as_ref().filter(|_| one_machine) {
            lacks.push(format!("no POSIX fd ({})", cut(why)));
        }
        if !lacks.is_empty() {
            reasons.push(format!("rank {index}: {}", lacks.join(", ")));
        }
    }
    reasons.extend(unreachable.iter().cloned());
    Err(few(reasons))
}

/// Returns the first reasons, cut.
pub(super) fn few(mut reasons: Vec<String>) -> Vec<String> {
    let more = reasons.len() > REASONS;
    reasons.truncate(REASONS);
    let mut reasons: Vec<String> = reasons.iter().map(|reason| cut(reason)).collect();
    if more {
        reasons.push("and further reasons".into());
    }
    reasons
}

/// Returns the beginning of a reason.
pub(super) fn cut(text: &str) -> String {
    bounded(text, REASON_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank of a machine that can use fabric handles, fds, or both.
    fn rank(boot: u8, fabric: bool, fds: bool) -> Statement {
        Statement {
            version: 1,
            rank: 0,
            size: 2,
            boot: BootId::from_bytes([boot; 16]),
            memory: None,
            no_fabric: (!fabric).then(|| "no IMEX channel".into()),
            no_fds: (!fds).then(|| "no socket".into()),
            socket: None,
        }
    }

    fn decide(ranks: &[(u8, bool, bool)]) -> Result<HandleType, Vec<String>> {
        let ranks: Vec<_> = ranks.iter().map(|&(b, f, p)| rank(b, f, p)).collect();
        agree(&ranks, &[])
    }

    #[test]
    fn fds_on_one_machine_and_fabric_elsewhere() {
        let (fds, fabric) = (Ok(HandleType::PosixFd), Ok(HandleType::Fabric));
        assert_eq!(decide(&[(1, true, true), (1, true, true)]), fds);
        assert_eq!(decide(&[(1, false, true), (1, true, true)]), fds);
        assert_eq!(decide(&[(1, true, true), (1, true, false)]), fabric);
        assert_eq!(decide(&[(1, true, true), (2, true, true)]), fabric);
    }

    #[test]
    fn ranks_that_cannot_reach_each_other_use_fabric_handles_or_say_why() {
        let why = ["rank 0 cannot reach rank 1: no such file".to_owned()];
        let both = [rank(1, true, true), rank(1, true, true)];
        assert_eq!(agree(&both, &why), Ok(HandleType::Fabric));
        let fds = [rank(1, true, true), rank(1, false, true)];
        let reasons = agree(&fds, &why).unwrap_err();
        assert_eq!(
            reasons,
            [
                "rank 1: no fabric (no IMEX channel)",
                "rank 0 cannot reach rank 1: no such file"
            ]
        );
    }

    #[test]
    fn ranks_that_exclude_each_other_say_why() {
        let reasons = decide(&[(1, false, true), (1, true, false)]).unwrap_err();
        assert_eq!(
            reasons,
            [
                "rank 0: no fabric (no IMEX channel)",
                "rank 1: no POSIX fd (no socket)"
            ]
        );
        let reasons = decide(&[(1, true, true), (2, false, true)]).unwrap_err();
        assert!(reasons[0].contains("more than one machine"), "{reasons:?}");
        assert_eq!(reasons[1..], ["rank 1: no fabric (no IMEX channel)"]);
    }

    #[test]
    fn reasons_are_few_and_short() {
        let ranks: Vec<_> = (0..1000)
            .map(|_| Statement {
                no_fabric: Some("ä".repeat(4000)),
                ..rank(0, false, false)
            })
            .collect();
        let reasons = agree(&ranks, &[]).unwrap_err();
        assert_eq!(reasons.len(), REASONS + 1);
        assert!(reasons.iter().all(|reason| reason.len() <= REASON_BYTES));
    }
}
