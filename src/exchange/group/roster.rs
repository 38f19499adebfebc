//! The members of a completed round, encoded once for all its ranks.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};

use zeroize::Zeroizing;

use crate::account::{Charge, ENTRY, REQUEST};
use crate::protocol::{Handles, Member, Members, encode};
use crate::transport::HeldFd;

/// The size limits of a page.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageLimits {
    /// Bytes, unless a single member is bigger.
    pub bytes: usize,
    /// Fds, unless a single member has more.
    pub fds: usize,
}

/// All members with their handles, in pages that fit into frames. The bytes are secret; they are encoded once
/// and shared by the replies to all ranks.
pub(super) struct Roster {
    pages: Vec<Page>,
    fds: Vec<HeldFd>,
    /// For the bytes, if the ranks' seats are not charged for them.
    _charges: Vec<Charge>,
}

struct Page {
    first: u32,
    bytes: Zeroizing<Vec<u8>>,
    fds: Range<usize>,
}

impl Roster {
    /// Creates a roster from the members in order, and their fds in the order of members and parts.
    pub fn new(mut members: Vec<Member>, fds: Vec<HeldFd>, limits: PageLimits) -> Self {
        let total = members.len();
        let (mut first, mut fd) = (0, 0);
        let mut pages = Vec::new();
        loop {
            let (mut count, mut bytes, mut page_fds) = (0, 0, 0);
            for member in &members {
                let size = encode(member).len();
                let member_fds = fds_of(member);
                let full = bytes + size > limits.bytes || page_fds + member_fds > limits.fds;
                if full && count > 0 {
                    break;
                }
                count += 1;
                bytes += size;
                page_fds += member_fds;
            }
            let rest = members.split_off(count);
            let more = !rest.is_empty();
            let page = Members { members, more };
            pages.push(Page {
                first,
                bytes: encode(&page),
                fds: fd..(fd + page_fds).min(fds.len()),
            });
            first += u32::try_from(count).unwrap_or(u32::MAX);
            fd += page_fds;
            members = rest;
            if !more {
                break;
            }
        }
        debug_assert_eq!(first as usize, total);
        Self {
            pages,
            fds,
            _charges: Vec::new(),
        }
    }

    /// Keeps these charges as long as the roster's bytes, and reduces each to a request and its share of them.
    pub fn charged(self, mut charges: Vec<Charge>) -> Self {
        let bytes = self.pages.iter().map(|page| page.bytes.capacity() + ENTRY);
        let share = bytes.sum::<usize>().div_ceil(charges.len().max(1));
        for charge in &mut charges {
            charge.shrink_to(REQUEST + share);
        }
        Self {
            _charges: charges,
            ..self
        }
    }

    /// Returns the page that begins with rank `first`.
    pub fn page(&self, first: u32) -> Option<usize> {
        self.pages.iter().position(|page| page.first == first)
    }

    /// Returns the bytes of a whole reply frame: those of `[id, {"members": …}]`.
    pub fn reply(&self, page: usize, id: u64) -> Zeroizing<Vec<u8>> {
        let body = &self.pages[page].bytes;
        let mut bytes = Zeroizing::new(Vec::with_capacity(body.len() + 32));
        bytes.extend_from_slice(b"\x82");
        bytes.extend_from_slice(&encode(&id));
        bytes.extend_from_slice(b"\xa1\x67members");
        bytes.extend_from_slice(body);
        bytes
    }

    /// Returns the fds that are sent with a page.
    pub fn fds(&self, page: usize) -> Vec<BorrowedFd<'_>> {
        let range = self.pages[page].fds.clone();
        self.fds[range].iter().map(AsFd::as_fd).collect()
    }
}

fn fds_of(member: &Member) -> usize {
    match &member.handles {
        Some(Handles::Fds(fds)) => fds.count as usize,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{Answer, Fds, Secret, decode};

    fn members(count: usize) -> Vec<Member> {
        (0..count)
            .map(|rank| Member {
                bytes: None,
                peer: format!("node-{rank}"),
                memory: None,
                handles: Some(Handles::Fabric(vec![
                    Secret::new(&[rank as u8; 64]).unwrap(),
                ])),
            })
            .collect()
    }

    fn read(roster: &Roster, page: usize) -> Members {
        decode(&roster.pages[page].bytes).unwrap()
    }

    #[test]
    fn what_fits_is_one_page() {
        let limits = PageLimits {
            bytes: 1 << 20,
            fds: 253,
        };
        let all = members(576);
        let roster = Roster::new(all.clone(), Vec::new(), limits);
        assert_eq!(roster.pages.len(), 1);
        let page = read(&roster, 0);
        assert_eq!((&page.members, page.more), (&all, false));
        let whole = (1_u64 << 40, Answer::Members(page));
        assert_eq!(roster.reply(0, 1 << 40), encode(&whole));
    }

    #[test]
    fn pages_hold_every_member_once() {
        let limits = PageLimits {
            bytes: 1000,
            fds: 253,
        };
        let all = members(100);
        let roster = Roster::new(all.clone(), Vec::new(), limits);
        assert!(roster.pages.len() > 5);
        let (mut seen, mut first) = (Vec::new(), 0);
        loop {
            let page = roster.page(first).unwrap();
            assert!(roster.pages[page].bytes.len() < 1100);
            let members = read(&roster, page);
            assert_eq!(members.more, page + 1 < roster.pages.len());
            first += members.members.len() as u32;
            seen.extend(members.members);
            if !members.more {
                break;
            }
        }
        assert_eq!(seen, all);
        assert_eq!(roster.page(1), None, "not where a page begins");
    }

    #[test]
    fn fds_go_with_the_page_of_their_member() {
        let limits = PageLimits {
            bytes: 1 << 20,
            fds: 4,
        };
        let member = |count| Member {
            bytes: None,
            peer: String::new(),
            memory: None,
            handles: Some(Handles::Fds(Fds::of(count))),
        };
        let fd = || {
            let file = std::fs::File::open("/dev/null").unwrap();
            HeldFd::from(std::os::fd::OwnedFd::from(file))
        };
        let roster = Roster::new(
            vec![member(3), member(1), member(2), member(6), member(0)],
            (0..12).map(|_| fd()).collect(),
            limits,
        );
        let counts: Vec<_> = (0..roster.pages.len())
            .map(|page| roster.fds(page).len())
            .collect();
        assert_eq!(counts, [4, 2, 6, 0]);
    }
}
