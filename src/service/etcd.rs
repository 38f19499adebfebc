//! The service's registration in etcd.

use crate::config::DirectoryConfig;
use crate::exchange::directory::{Directory, EtcdOptions, Exporter, Registration};
use crate::exchange::{Address, Server};
use crate::share::BootId;
use crate::{Error, Result};

/// Checks the options to reach etcd.
pub(crate) fn check(config: &DirectoryConfig) -> Result<()> {
    options(config).check()
}

/// Registers the service in etcd; its names follow as they are published.
pub(crate) async fn register(config: &DirectoryConfig, server: &Server) -> Result<Registration> {
    let mut options = options(config);
    if let (Some(user), Some(file)) = (&config.user, &config.password_file) {
        let text = std::fs::read_to_string(file)
            .map_err(|error| Error::system(format!("cannot read {}", file.display()), &error))?;
        let text = zeroize::Zeroizing::new(text);
        options = options.user(user.as_str(), text.trim_end_matches('\n'));
    }
    let unix = server.addresses().into_iter().filter(Address::is_unix);
    Directory::etcd(options)?.register(Exporter {
        addresses: std::iter::once(config.advertise.clone())
            .chain(unix)
            .collect(),
        instance: server.instance(),
        boot: BootId::current()?,
    })
}

/// Returns the options to reach etcd, without the user.
fn options(config: &DirectoryConfig) -> EtcdOptions {
    let mut options = EtcdOptions::new(config.endpoints.clone())
        .prefix(config.prefix.as_str())
        .lease(config.lease);
    if let Some(ca) = &config.ca {
        options = options.ca(ca);
    }
    match (&config.cert, &config.key) {
        (Some(cert), Some(key)) => options.identity(cert, key),
        _ => options,
    }
}
