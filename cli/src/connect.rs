//! How a command reaches a cluster: endpoints, token and certificates, as options.

use std::net::{TcpStream, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use orthodrome_client::{Config, Tls};

/// How long [`Connect::note_refusals`] waits for one endpoint.
const PROBE: Duration = Duration::from_millis(300);

/// Where the cluster is.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Connection")]
pub struct Connect {
    /// Addresses of gateways of the cluster, the nearest first
    #[arg(
        long,
        value_name = "HOST:PORT[,…]",
        env = "ORTHODROME_CONNECT",
        value_delimiter = ',',
        default_value = "127.0.0.1:7400",
        value_parser = endpoint
    )]
    connect: Vec<String>,
    /// File that contains the client's token
    #[arg(long, value_name = "FILE", env = "ORTHODROME_TOKEN_FILE")]
    token_file: Option<PathBuf>,
    /// Certificate of the authority that signed the gateways' certificates (PEM file); enables TLS
    #[arg(long, value_name = "FILE", env = "ORTHODROME_TLS_CA")]
    tls_ca: Option<PathBuf>,
    /// Name in the gateways' certificates [default: the host in --connect]
    #[arg(long, value_name = "NAME", requires = "tls_ca")]
    tls_name: Option<String>,
    /// Client certificate (PEM file), for clusters that authenticate clients by certificate
    #[arg(long, value_name = "FILE", requires = "tls_ca", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Private key of the client certificate (PEM file)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
}

/// Accepts an endpoint with or without a scheme; `--tls-ca`, not the scheme, decides whether TLS is
/// used.
fn endpoint(text: &str) -> Result<String, String> {
    let text = text.trim();
    let bare = ["http://", "https://"].iter().find_map(|scheme| text.strip_prefix(scheme));
    let bare = bare.unwrap_or(text).trim_end_matches('/');
    match bare.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => Ok(bare.into()),
        Some(_) | None => Err("use host:port, such as localhost:7400".into()),
    }
}

impl Connect {
    /// The endpoints, as given.
    pub fn endpoints(&self) -> &[String] {
        &self.connect
    }

    /// Says at once which endpoints refuse connections: no program listens there. The client
    /// library goes on trying until its deadline.
    pub fn note_refusals(&self) {
        for endpoint in &self.connect {
            let addresses = endpoint.to_socket_addrs();
            let Some(address) = addresses.ok().and_then(|mut all| all.next()) else { continue };
            let tried = TcpStream::connect_timeout(&address, PROBE);
            if tried.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused) {
                note!("no node listens on {endpoint}; trying again until the deadline");
            }
        }
    }

    /// A configuration of the client library for these endpoints, in this order.
    pub fn config(&self, endpoints: &[String]) -> anyhow::Result<Config> {
        let mut config = Config::new(endpoints);
        if let Some(path) = &self.token_file {
            let token = String::from_utf8(read("--token-file", path)?).with_context(|| {
                format!("--token-file {}: the file is not UTF-8 text", path.display())
            })?;
            config = config.token(token.trim());
        }
        if let Some(path) = &self.tls_ca {
            let identity = match (&self.tls_cert, &self.tls_key) {
                (Some(cert), Some(key)) => {
                    Some((read("--tls-cert", cert)?, read("--tls-key", key)?))
                }
                (None, _) | (_, None) => None,
            };
            let server_name = self.tls_name.clone();
            config = config.tls(Tls { authority: read("--tls-ca", path)?, server_name, identity });
        }
        Ok(config)
    }
}

fn read(option: &str, path: &Path) -> anyhow::Result<Vec<u8>> {
    std::fs::read(path)
        .with_context(|| format!("{option} {}: cannot read the file", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_may_have_a_scheme_and_must_have_a_port() {
        for (text, expected) in [
            ("localhost:7400", "localhost:7400"),
            ("http://127.0.0.1:1/", "127.0.0.1:1"),
            (" https://[::1]:65535", "[::1]:65535"),
        ] {
            assert_eq!(endpoint(text).as_deref(), Ok(expected));
        }
        for text in ["", "localhost", ":1", "localhost:", "localhost:70000"] {
            assert!(endpoint(text).is_err(), "{text:?}");
        }
    }
}
