//! How the commands connect to an exchange's server.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use egmem::Driver;
use egmem::exchange::protocol::check_name;
use egmem::exchange::{Address, Client, ClientOptions, Error, Result, Security, Tls, TlsFiles};
use egmem::share::Peers;

/// The default socket of the service, below XDG_RUNTIME_DIR or /run.
const SOCKET: &str = "egmem/egmem.sock";

/// How the connection is protected, and how long it may take.
#[derive(Args, Clone, Debug)]
pub struct Connect {
    /// The authority's certificate (ca.pem); or EGMEM_CA
    #[arg(long, value_name = "FILE", requires = "cert")]
    ca: Option<PathBuf>,
    /// This peer's certificate; or EGMEM_CERT
    #[arg(long, value_name = "FILE", requires = "key")]
    cert: Option<PathBuf>,
    /// Its key; or EGMEM_KEY
    #[arg(long, value_name = "FILE", requires = "ca")]
    key: Option<PathBuf>,
    /// Revocation lists (crl.pem); or EGMEM_CRL. A server's certificate must then be covered by a list
    #[arg(long, value_name = "FILE")]
    crl: Option<PathBuf>,
    /// The name that the server's certificate must have, instead of the address: a DNS name or a SPIFFE id
    #[arg(long, value_name = "NAME")]
    expect_peer: Option<String>,
    /// Connect to other machines without TLS: anyone on the network path can read the handles
    #[arg(long, conflicts_with = "ca")]
    plain_anywhere: bool,
    /// Also trust a Unix socket of this user, besides your own and root's
    #[arg(long, value_name = "UID")]
    server_user: Vec<u32>,
    /// Time limit for connecting, and then for each answer, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    connect_timeout: u64,
}

impl Connect {
    /// Connects to `address`; memory is imported into `driver`.
    pub async fn client(&self, address: &Address, driver: &Driver) -> Result<Client> {
        self.options(address)?.connect(driver).await
    }

    /// Connects for queries only: it needs no GPU and uses none.
    pub async fn onlooker(&self, address: &Address) -> Result<Client> {
        self.options(address)?.connect_without_driver().await
    }

    fn options(&self, address: &Address) -> Result<ClientOptions> {
        let mut peers = Peers::same_user().and_user(0);
        for &uid in &self.server_user {
            peers = peers.and_user(uid);
        }
        let agent = concat!("egmem ", env!("CARGO_PKG_VERSION"), " (command line)");
        Ok(Client::options(address.clone())
            .security(self.security()?)
            .peers(peers)
            .agent(agent)
            .timeout(Duration::from_secs(self.connect_timeout)))
    }

    fn security(&self) -> Result<Security> {
        let given = |option: &Option<PathBuf>, name: &str| {
            let from_env = || std::env::var_os(name).filter(|value| !value.is_empty());
            option.clone().or_else(|| from_env().map(PathBuf::from))
        };
        if self.plain_anywhere {
            return Ok(Security::PlainAnywhere);
        }
        let files = [
            (&self.ca, "EGMEM_CA"),
            (&self.cert, "EGMEM_CERT"),
            (&self.key, "EGMEM_KEY"),
        ];
        let invalid = |why: &str| Err(Error::invalid("certificates", why));
        match files.map(|(option, name)| given(option, name)) {
            [Some(ca), Some(cert), Some(key)] => {
                let crl = given(&self.crl, "EGMEM_CRL");
                let tls = Tls::load(TlsFiles { ca, cert, key, crl })?;
                Ok(Security::Tls(match &self.expect_peer {
                    Some(name) => tls.expect_peer(name)?,
                    None => tls,
                }))
            }
            [None, None, None] if self.crl.is_some() || self.expect_peer.is_some() => {
                invalid("--crl and --expect-peer need --ca, --cert and --key")
            }
            [None, None, None] => Ok(Security::Plain),
            _ => invalid(
                "EGMEM_CA, EGMEM_CERT and EGMEM_KEY go together, as --ca, --cert and --key do",
            ),
        }
    }
}

/// Returns the address of this machine's service: the user's own below XDG_RUNTIME_DIR, if there is one,
/// otherwise the system's.
pub fn default_address() -> Result<Address> {
    let own = folder_in("XDG_RUNTIME_DIR");
    let folders = own.into_iter().chain([PathBuf::from("/run")]);
    first_of(folders, SOCKET).map(Address::Unix).map_err(|tried| {
        let why = format!(
            "none is given, and there is no service at {tried}; start `egmem serve`, or say where it is"
        );
        Error::invalid("ADDRESS", why)
    })
}

/// Returns the folder that an environment variable names. A relative path, which would be below the working directory, counts
/// as none.
pub fn folder_in(variable: &str) -> Option<PathBuf> {
    let folder = std::env::var_os(variable).map(PathBuf::from);
    folder.filter(|folder| folder.is_absolute())
}

/// Returns the first path that exists of those called `name` in the folders; otherwise all that were tried.
pub fn first_of(
    folders: impl Iterator<Item = PathBuf>,
    name: &str,
) -> std::result::Result<PathBuf, String> {
    let paths: Vec<_> = folders.map(|folder| folder.join(name)).collect();
    match paths.iter().find(|path| path.exists()) {
        Some(path) => Ok(path.clone()),
        None => {
            let tried = paths.iter().map(|path| path.display().to_string());
            Err(tried.collect::<Vec<_>>().join(" or "))
        }
    }
}

/// Parses a name of memory, for clap.
pub fn name(text: &str) -> std::result::Result<String, String> {
    check_name(text).map_err(|error| error.to_string())?;
    Ok(text.to_owned())
}

/// Runs `work` on a runtime of its own. A second thread keeps leases alive while this one reads or writes
/// gigabytes, or waits for a slow disk or pipe.
pub fn block_on<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .map_err(|error| Error::system("cannot start a runtime", &error))?
        .block_on(work)
}
