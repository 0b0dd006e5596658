//! The gateways' addresses, and how to connect to them.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use tokio::sync::mpsc::UnboundedSender;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

use crate::Error;
use crate::attempt::{Attempt, Recorder};

/// How to reach a cluster. Its debug form shows no secret.
#[derive(Clone)]
pub struct Config {
    endpoints: Vec<String>,
    token: Option<String>,
    tls: Option<Tls>,
    pub(crate) deadline: Duration,
    pub(crate) attempt_timeout: Duration,
    pub(crate) recorder: Recorder,
}

/// TLS to the gateways. Its debug form shows no key.
#[derive(Clone, Default)]
pub struct Tls {
    /// The certificate of the authority that signed the gateways' certificates, in PEM.
    pub authority: Vec<u8>,
    /// The name in the gateways' certificates, if it differs from the host of the endpoint.
    pub server_name: Option<String>,
    /// This client's certificate chain and private key in PEM, if it authenticates with them.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("server_name", &self.server_name).finish_non_exhaustive()
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("endpoints", &self.endpoints)
            .field("tls", &self.tls)
            .finish_non_exhaustive()
    }
}

impl Config {
    /// Gateways as `host:port`, the nearest first. The client uses the first that answers. If that
    /// one fails, it tries the others in this order.
    pub fn new(endpoints: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self {
            endpoints: endpoints.into_iter().map(Into::into).collect(),
            token: None,
            tls: None,
            deadline: Duration::from_secs(10),
            attempt_timeout: Duration::from_secs(5),
            recorder: Recorder::default(),
        }
    }

    /// Sends every attempt that the library makes to `attempts` when it has ended, in order, for
    /// callers that record a history. The receiver must keep up, or the queue fills the memory.
    #[must_use]
    pub fn attempts(mut self, attempts: UnboundedSender<Attempt>) -> Self {
        self.recorder = Recorder(Some(attempts));
        self
    }

    /// Authenticates with a token. Without TLS, the client sends a token only to a loopback
    /// address.
    #[must_use]
    pub fn token(mut self, token: impl Into<String>) -> Self {
        self.token = Some(token.into());
        self
    }

    /// Connects with TLS.
    #[must_use]
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Sets the default deadline of a call, retries included. The default is 10 s.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets how long to wait for one gateway's answer to one request before asking another. It must
    /// be longer than the slowest transaction takes. The default is 5 s.
    #[must_use]
    pub fn attempt_timeout(mut self, timeout: Duration) -> Self {
        self.attempt_timeout = timeout;
        self
    }

    pub(crate) fn bearer(&self) -> Result<Option<MetadataValue<Ascii>>, Error> {
        let Some(token) = &self.token else { return Ok(None) };
        let mut value: MetadataValue<Ascii> = format!("Bearer {token}").parse().map_err(|_| {
            Error::Config(
                "token: contains characters that a header cannot have; check the token file".into(),
            )
        })?;
        value.set_sensitive(true);
        Ok(Some(value))
    }

    /// The endpoints, checked for errors.
    pub(crate) fn endpoints(&self) -> Result<Vec<(String, Endpoint)>, Error> {
        if self.endpoints.is_empty() {
            return Err(Error::Config("endpoints: use at least one, as host:port".into()));
        }
        self.endpoints.iter().map(|text| Ok((text.clone(), self.endpoint(text)?))).collect()
    }

    fn endpoint(&self, text: &str) -> Result<Endpoint, Error> {
        let wrong = |problem: &str| Error::Config(format!("endpoint {text:?}: {problem}"));
        let host = match text.rsplit_once(':') {
            Some((host, port)) if port.parse::<u16>().is_ok() && !host.contains("//") => host,
            Some(_) | None => return Err(wrong("use host:port")),
        };
        if self.token.is_some() && self.tls.is_none() && !is_loopback(host) {
            return Err(wrong("without TLS the token would be sent unencrypted; configure TLS"));
        }
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let endpoint = Endpoint::from_shared(format!("{scheme}://{text}"))
            .map_err(|error| wrong(&error.to_string()))?
            .tcp_nodelay(true)
            .connect_timeout(self.attempt_timeout)
            .http2_keep_alive_interval(Duration::from_secs(5))
            .keep_alive_timeout(self.attempt_timeout);
        let Some(tls) = &self.tls else { return Ok(endpoint) };
        let mut config =
            ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&tls.authority));
        if let Some(name) = &tls.server_name {
            config = config.domain_name(name);
        }
        if let Some((certificate, key)) = &tls.identity {
            config = config.identity(Identity::from_pem(certificate, key));
        }
        endpoint.tls_config(config).map_err(|error| wrong(&format!("TLS: {error}")))
    }
}

fn is_loopback(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unusable_endpoints_are_rejected_by_name() {
        let cases = [
            (Config::new(Vec::<String>::new()), "at least one"),
            (Config::new(["example"]), "\"example\""),
            (Config::new(["http://localhost:1"]), "host:port"),
            (Config::new(["localhost:99999"]), "host:port"),
            (Config::new(["db.example:1"]).token("a-token"), "unencrypted"),
        ];
        for (config, expected) in cases {
            let message = config.endpoints().unwrap_err().to_string();
            assert!(message.contains(expected), "{message:?} does not contain {expected:?}");
        }
        for fine in ["localhost:1", "127.0.0.1:1", "[::1]:1"] {
            assert!(Config::new([fine]).token("a-token").endpoints().is_ok(), "{fine}");
        }
    }

    #[test]
    fn no_debug_form_shows_a_secret() {
        let tls = Tls { identity: Some((Vec::new(), b"hush".to_vec())), ..Tls::default() };
        let config = Config::new(["localhost:1"]).token("hush").tls(tls);
        assert!(!format!("{config:?} {:?}", config.bearer()).contains("hush"));
        assert!(Config::new(["localhost:1"]).token("hush\n").bearer().is_err());
    }
}
