//! A service's configuration: an accepted one can be written, and reads back the same.
#![no_main]

use egmem::service::ServiceConfig;

libfuzzer_sys::fuzz_target!(|text: &str| {
    if let Ok(config) = ServiceConfig::from_toml(text) {
        let json = serde_json::to_string(&config).expect("our own");
        let again: ServiceConfig = serde_json::from_str(&json).expect("our own");
        assert_eq!(again, config);
    }
});
