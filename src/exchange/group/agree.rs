//! Chooses one handle type for all ranks, or collects each rank's reason against it; a pure function.

use crate::client;
use crate::driver::HandleType;
use crate::share::BootId;

/// The most reasons that are passed on, and the most bytes of each. People read them.
const REASONS: usize = 64;
const REASON_BYTES: usize = 256;

/// The abilities of one rank.
pub(super) struct Rank<'a> {
    /// Its machine.
    pub boot: BootId,
    /// The handle types that it can export and import.
    pub can: &'a [HandleType],
    /// Why it cannot use the other types.
    pub cannot: &'a [String],
}

/// Returns the handle type that all ranks use: fabric if every rank can, else fds if every rank can and all
/// are on one machine.
///
/// # Errors
///
/// Otherwise the reasons, as stated by each rank that prevents the choice.
pub(super) fn agree(ranks: &[Rank<'_>]) -> Result<HandleType, Vec<String>> {
    let all = |handle| ranks.iter().all(|rank| rank.can.contains(&handle));
    let one_machine = ranks.windows(2).all(|pair| pair[0].boot == pair[1].boot);
    if all(HandleType::Fabric) {
        return Ok(HandleType::Fabric);
    }
    if one_machine && all(HandleType::PosixFd) {
        return Ok(HandleType::PosixFd);
    }
    let mut reasons = Vec::new();
    if !one_machine {
        reasons
            .push("the ranks are on more than one machine, so POSIX fds cannot be passed".into());
    }
    for (index, rank) in ranks.iter().enumerate() {
        let lacks: Vec<String> = [HandleType::Fabric, HandleType::PosixFd]
            .into_iter()
            .filter(|handle| *handle == HandleType::Fabric || one_machine)
            .filter(|handle| !rank.can.contains(handle))
            .map(|handle| format!("no {handle}"))
            .collect();
        if lacks.is_empty() {
            continue;
        }
        if reasons.len() == REASONS {
            reasons.push("and other ranks".into());
            break;
        }
        let mut reason = format!("rank {index}: {}", lacks.join(", "));
        for why in rank.cannot {
            reason += &format!(" ({})", cut(why));
        }
        reasons.push(cut(&reason).into());
    }
    Err(reasons)
}

/// Returns the beginning of a reason.
pub(super) fn cut(text: &str) -> &str {
    client::cut(text, REASON_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: &[HandleType] = &[HandleType::PosixFd, HandleType::Fabric];
    const FD: &[HandleType] = &[HandleType::PosixFd];
    const FABRIC: &[HandleType] = &[HandleType::Fabric];

    fn decide(ranks: &[(u8, &[HandleType])]) -> Result<HandleType, Vec<String>> {
        let cannot = ["no IMEX channel".to_owned()];
        let ranks: Vec<_> = ranks
            .iter()
            .map(|&(boot, can)| Rank {
                boot: BootId::from_bytes([boot; 16]),
                can,
                cannot: if can.len() < 2 { &cannot } else { &[] },
            })
            .collect();
        agree(&ranks)
    }

    #[test]
    fn fabric_where_every_rank_can_wherever_it_is() {
        assert_eq!(decide(&[(1, BOTH), (1, BOTH)]), Ok(HandleType::Fabric));
        assert_eq!(decide(&[(1, BOTH), (2, FABRIC)]), Ok(HandleType::Fabric));
    }

    #[test]
    fn fds_only_on_one_machine() {
        assert_eq!(decide(&[(1, BOTH), (1, FD)]), Ok(HandleType::PosixFd));
        let reasons = decide(&[(1, BOTH), (2, FD)]).unwrap_err();
        assert!(reasons[0].contains("more than one machine"), "{reasons:?}");
        assert_eq!(reasons[1..], ["rank 1: no fabric (no IMEX channel)"]);
    }

    #[test]
    fn ranks_that_exclude_each_other_say_why() {
        let reasons = decide(&[(1, FD), (1, FABRIC)]).unwrap_err();
        assert_eq!(
            reasons,
            [
                "rank 0: no fabric (no IMEX channel)",
                "rank 1: no POSIX fd (no IMEX channel)"
            ]
        );
    }

    #[test]
    fn reasons_are_few_and_short() {
        let long = ["ä".repeat(4000)];
        let rank = || Rank {
            boot: BootId::from_bytes([0; 16]),
            can: &[],
            cannot: &long,
        };
        let ranks: Vec<_> = (0..1000).map(|_| rank()).collect();
        let reasons = agree(&ranks).unwrap_err();
        assert_eq!(reasons.len(), REASONS + 1);
        assert!(reasons.iter().all(|reason| reason.len() <= REASON_BYTES));
    }
}
