//! Certificates, keys and revocation lists, each at each place.
#![no_main]

use egmem::certs::Authority;
use egmem::exchange::{Error, Tls, TlsPem};

libfuzzer_sys::fuzz_target!(|text: &str| {
    let pem = text.as_bytes();
    let result = Tls::from_pem(TlsPem {
        ca: pem,
        cert: pem,
        key: pem,
        crl: pem.starts_with(b"\n").then_some(pem),
    });
    if let Err(error) = result {
        assert!(matches!(error, Error::Tls { .. }), "{error}");
    }
    if let Err(error) = Authority::load(text, text) {
        assert!(matches!(error, Error::Tls { .. }), "{error}");
    }
});
