//! Addresses, peers, patterns, names, ids, calls: the text of a parsed value parses as the same value.
#![no_main]

use std::fmt::{Debug, Display};
use std::str::FromStr;

use egmem::driver::Call;
use egmem::exchange::protocol::{check_name, check_prefix};
use egmem::exchange::{Address, PeerName, PeerList};
use egmem::share::{BootId, InstanceId};

fn reads_back<T: FromStr<Err: Debug> + Display + PartialEq + Debug>(text: &str) {
    if let Ok(value) = text.parse::<T>() {
        assert_eq!(value.to_string().parse::<T>().expect("our own"), value);
    }
}

libfuzzer_sys::fuzz_target!(|text: &str| {
    reads_back::<Address>(text);
    reads_back::<PeerName>(text);
    reads_back::<BootId>(text);
    reads_back::<InstanceId>(text);
    reads_back::<Call>(text);
    if let Ok(who) = PeerList::list(text.lines()) {
        let json = serde_json::to_string(&who).expect("our own");
        assert_eq!(serde_json::from_str::<PeerList>(&json).expect("our own"), who);
        for peer in text
            .lines()
            .filter_map(|line| line.parse::<PeerName>().ok())
        {
            assert!(who.admits(&peer), "{peer} is named");
        }
    }
    if check_name(text).is_ok() {
        assert!(check_prefix(text).is_ok() && !text.is_empty() && text.is_ascii());
    }
});
