//! Checks addresses, limits and the directory with the functions that the server itself uses.

use std::net::IpAddr;

use super::check::wrong;
use super::options::server_options;
use super::tables::{MetricsConfig, ServiceConfig};
use crate::Result;
use crate::exchange::{Address, Security};
use crate::http;

impl ServiceConfig {
    /// Checks for values that the exchange's server, the metrics endpoint and the directory would refuse.
    ///
    /// # Errors
    /// Theirs. A host name other than `localhost` is refused if only addresses of this machine are served,
    /// because its addresses are not known before the start.
    pub(super) fn check_network(&self) -> Result<()> {
        let plain = self.tls.is_none() && !self.plain_anywhere;
        // This does not load certificates. With TLS every address is served, as with `PlainAnywhere`.
        let security = match plain {
            true => Security::Plain,
            false => Security::PlainAnywhere,
        };
        server_options(self, security).check()?;
        for address in &self.listen {
            if plain && is_other_name(address) {
                return Err(wrong(format!(
                    "`listen`: {address} is a host name; without `tls` give `localhost` or an IP address of loopback"
                )));
            }
        }
        if let Some(metrics) = &self.metrics {
            metrics.check()?;
        }
        if self.buffers.len() > self.limits.names {
            return Err(wrong(format!(
                "{} buffers are more than `limits.names`, {}",
                self.buffers.len(),
                self.limits.names
            )));
        }
        Ok(())
    }
}

impl MetricsConfig {
    fn check(&self) -> Result<()> {
        let address: Address = format!("tcp://{}", self.address).parse().map_err(|_| {
            wrong(format!(
                "`metrics.address` is '{}', not host:port",
                self.address
            ))
        })?;
        if self.anywhere {
            return Ok(());
        }
        match literal(&address) {
            Some(ip) if !ip.is_loopback() => Err(http::elsewhere(&self.address)),
            None if is_other_name(&address) => Err(http::elsewhere(&self.address)),
            _ => Ok(()),
        }
    }
}

fn literal(address: &Address) -> Option<IpAddr> {
    match address {
        Address::Tcp { host, .. } => host.parse().ok(),
        Address::Unix(_) => None,
    }
}

/// Returns whether this is a host name whose addresses may lie beyond loopback.
fn is_other_name(address: &Address) -> bool {
    match address {
        Address::Tcp { host, .. } => {
            host.parse::<IpAddr>().is_err() && !host.eq_ignore_ascii_case("localhost")
        }
        Address::Unix(_) => false,
    }
}
