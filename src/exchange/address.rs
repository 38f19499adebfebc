//! Where an exchange's server listens.

use std::fmt;
use std::net::Ipv6Addr;
use std::path::PathBuf;
use std::str::FromStr;

use crate::access::{number, serde_by_text};
use crate::{Error, Result};

/// The longest path of a Unix socket in bytes: `sockaddr_un` has 108, including a final NUL.
const MAX_PATH: usize = 107;
/// The longest host name in bytes (RFC 1035).
const MAX_HOST: usize = 253;

/// The address of a server: `tcp://host:port`, `host:port` or `unix:/path`.
///
/// ```
/// use egmem::exchange::Address;
///
/// let address: Address = "node7.cluster:7420".parse()?;
/// assert_eq!(address.to_string(), "tcp://node7.cluster:7420");
/// assert_eq!("unix:/run/egmem.sock".parse::<Address>()?.to_string(), "unix:/run/egmem.sock");
/// # Ok::<(), egmem::exchange::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Address {
    /// A TCP port.
    Tcp {
        /// A host name, or an IP address without brackets.
        host: String,
        /// The port; 0 to listen at one that the kernel chooses.
        port: u16,
    },
    /// A Unix socket.
    Unix(PathBuf),
}

impl Address {
    /// Returns a TCP port of this machine's loopback interface; port 0 lets the kernel choose.
    pub fn loopback(port: u16) -> Self {
        Self::Tcp {
            host: "127.0.0.1".into(),
            port,
        }
    }

    /// Returns whether it is a Unix socket.
    pub const fn is_unix(&self) -> bool {
        matches!(self, Self::Unix(_))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp://[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp://{host}:{port}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl FromStr for Address {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong =
            |why: &str| Error::invalid_of("address", why, "tcp://host:port, host:port, unix:/path");
        if let Some(path) = text.strip_prefix("unix:") {
            // As in other URLs, two slashes begin a host; more than two count as one.
            let path = match path.trim_start_matches('/') {
                rest if path.len() - rest.len() > 2 => &path[path.len() - rest.len() - 1..],
                _ if path.starts_with("//") => return Err(wrong("a host before the path")),
                _ => path,
            };
            if path.is_empty() || path.contains('\0') {
                return Err(wrong("no path"));
            }
            if path.len() > MAX_PATH {
                return Err(wrong("a path of more than 107 bytes"));
            }
            return Ok(Self::Unix(path.into()));
        }
        let text = text.strip_prefix("tcp://").unwrap_or(text);
        let (host, digits) = text.rsplit_once(':').ok_or_else(|| wrong("no port"))?;
        let port = number(digits).ok_or_else(|| wrong("no port from 0 to 65535"))?;
        if host.contains('%') {
            let why = "an IPv6 address with a scope id, such as %eth0, which is not supported: \
                       write a host name, or an address that is not link-local (fe80::)";
            return Err(wrong(why));
        }
        let host = match host.strip_prefix('[') {
            Some(inner) => inner
                .strip_suffix(']')
                .filter(|inner| inner.parse::<Ipv6Addr>().is_ok())
                .ok_or_else(|| wrong("no IPv6 address in brackets"))?,
            None => {
                let good = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
                if host.is_empty() || host.len() > MAX_HOST || !host.bytes().all(good) {
                    return Err(wrong("no host name"));
                }
                host
            }
        };
        Ok(Self::Tcp {
            host: host.into(),
            port,
        })
    }
}

serde_by_text!(Address);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn addresses_are_read_and_shown() {
        for (text, shown) in [
            ("a:1", "tcp://a:1"),
            ("tcp://a.b:65535", "tcp://a.b:65535"),
            ("[::1]:0", "tcp://[::1]:0"),
            ("127.0.0.1:7420", "tcp://127.0.0.1:7420"),
            ("unix:/run/x", "unix:/run/x"),
            ("unix:///run/x", "unix:/run/x"),
            ("unix:////run/x", "unix:/run/x"),
            ("unix:rel", "unix:rel"),
        ] {
            let address: Address = text.parse().unwrap();
            assert_eq!(address.to_string(), shown);
            assert_eq!(shown.parse::<Address>().unwrap(), address);
            let json = serde_json::to_string(&address).unwrap();
            assert_eq!(serde_json::from_str::<Address>(&json).unwrap(), address);
        }
    }

    #[test]
    fn other_texts_are_refused() {
        let long = format!("unix:/{}", "x".repeat(107));
        for text in [
            "",
            ":",
            "a",
            "a:",
            ":1",
            "a:65536",
            "a:+1",
            "a:-1",
            "::1:5",
            "[::1]",
            "[a]:1",
            "a b:1",
            "unix:",
            "unix://run/x",
            "unix:a\0b",
            "http://a:1",
            "[::1:1",
            &long,
        ] {
            assert!(text.parse::<Address>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_scope_id_is_named_in_its_refusal() {
        for text in [
            "[fe80::1%eth0]:7740",
            "tcp://[fe80::1%2]:7740",
            "fe80::1%eth0:7740",
        ] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(
                error.contains("scope id") && error.contains("host name"),
                "{error}"
            );
        }
    }

    proptest! {
        #[test]
        fn an_address_reads_back(text in "(tcp://|unix:/{0,5})?[a-z0-9:./\\[\\]]{0,24}") {
            if let Ok(address) = text.parse::<Address>() {
                prop_assert_eq!(address.to_string().parse::<Address>().unwrap(), address);
            }
        }
    }
}
