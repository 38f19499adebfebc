//! Converts a configuration to options of the exchange.

use super::tables::ServiceConfig;
use crate::exchange::server::ServerOptions;
use crate::exchange::{Security, Server};
use crate::share::Peers;

/// Returns the options of the exchange's server. [`ServiceConfig::check`] checks the same options.
pub(crate) fn server_options(config: &ServiceConfig, security: Security) -> ServerOptions {
    let mut options = Server::options()
        .security(security)
        .limits(config.limits.clone())
        .heartbeat(config.lease.heartbeat)
        .lease(config.lease.expiry)
        .peers(peers(config));
    for address in &config.listen {
        options = options.listen(address.clone());
    }
    options
}

/// Returns the local users that may connect.
pub(crate) fn peers(config: &ServiceConfig) -> Peers {
    let peers = Peers::same_user();
    match config.local.any_user {
        true => peers.any_user(),
        false => config
            .local
            .users
            .iter()
            .fold(peers, |peers, &uid| peers.and_user(uid)),
    }
}
