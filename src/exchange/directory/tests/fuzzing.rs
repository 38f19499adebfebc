//! For tests/fuzz.

use super::{Exporter, Keys};

/// Decodes an entry of etcd: the key, a line feed, the value. An accepted entry must encode to the same
/// bytes.
pub fn entry(bytes: &[u8]) {
    let line = bytes.iter().position(|&byte| byte == b'\n');
    let (key, json) = bytes.split_at(line.unwrap_or(bytes.len()));
    let keys = Keys("/egmem/v1/".into());
    let Some((name, instance)) = keys.read(key) else {
        return;
    };
    let own = keys.name(&name, instance);
    assert!(own.starts_with(&keys.holders(&name)));
    assert_eq!(keys.read(own.as_bytes()), Some((name, instance)));
    if let Some(exporter) = json
        .get(1..)
        .and_then(|json| Exporter::from_value(json, instance))
    {
        assert_eq!(
            Exporter::from_value(&exporter.to_value(), instance),
            Some(exporter)
        );
    }
}
