//! TLS to sources and agents: verification of their certificates.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio_rustls::TlsConnector;

use super::stream::Pipe;

/// A trusted certificate authority, and the expected name in certificates.
#[derive(Clone)]
pub struct Trust {
    connector: TlsConnector,
    name: ServerName<'static>,
}

impl fmt::Debug for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Trust({:?})", self.name)
    }
}

impl Trust {
    /// Reads an authority's certificates (PEM), for connections to `address`.
    ///
    /// # Errors
    /// The problem with the field that names the file, or with the address.
    pub(crate) fn load(field: &str, authority: &Path, address: &str) -> Result<Self, String> {
        let bad = |what: String| {
            format!(
                "{field}: {}: {what}; give the authority's certificates in PEM",
                authority.display()
            )
        };
        let mut roots = RootCertStore::empty();
        for certificate in
            CertificateDer::pem_file_iter(authority).map_err(|error| bad(error.to_string()))?
        {
            let certificate = certificate.map_err(|error| bad(error.to_string()))?;
            roots.add(certificate).map_err(|error| bad(error.to_string()))?;
        }
        if roots.is_empty() {
            return Err(bad("it holds no certificate".into()));
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| bad(error.to_string()))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(host.clone()).map_err(|_| {
            format!("{field}: `{host}` can be no certificate's name; write a name or an address")
        })?;
        Ok(Self { connector: TlsConnector::from(Arc::new(config)), name })
    }

    /// Starts TLS on a connection whose other end is ready for it.
    pub(crate) async fn wrap(&self, pipe: Box<dyn Pipe>) -> io::Result<Box<dyn Pipe>> {
        let secured = self.connector.connect(self.name.clone(), pipe).await;
        let secured = secured.map_err(|error| {
            let text = format!("TLS with {}: {error}", self.name.to_str());
            io::Error::new(error.kind(), text)
        })?;
        Ok(Box::new(secured))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use orthodrome_core::NodeId;
    use orthodrome_geotp::contract::FromAgent;
    use orthodrome_geotp::contract::Xid;
    use orthodrome_geotp::sql::Dialect;
    use tokio::net::TcpListener;

    use super::super::driver::{Endpoint, Session, Trouble};
    use super::super::link;
    use super::super::local::LocalServer;
    use super::super::messages::Link;
    use super::super::run::acceptor;
    use super::*;
    use orthodrome_server::tls::{Authority, TlsFiles};

    fn files(directory: &Path) -> TlsFiles {
        std::fs::create_dir_all(directory).unwrap();
        let authority = Authority::new("test").unwrap();
        authority.issue(directory, NodeId(1), &["127.0.0.1".to_owned()]).unwrap()
    }

    fn trust(files: &TlsFiles) -> Option<Trust> {
        Some(Trust::load("tls_authority", &files.authority, "127.0.0.1:1").unwrap())
    }

    #[tokio::test]
    async fn sources_must_show_who_they_are() {
        let directory = tempfile::tempdir().unwrap();
        let (own, other) =
            (files(&directory.path().join("own")), files(&directory.path().join("other")));
        for (kind, text) in [
            (
                Dialect::PostgreSql,
                "SELECT version FROM pg_stat_ssl WHERE pid = pg_backend_pid() AND ssl",
            ),
            (
                Dialect::MariaDb,
                "SELECT variable_value FROM information_schema.session_status WHERE variable_name = 'SSL_VERSION'",
            ),
        ] {
            let mut server =
                LocalServer::start(kind, &directory.path().join(format!("{kind}"))).unwrap();
            let login = server.login();
            let endpoint = |trust: Option<Trust>| Endpoint { trust, ..login.endpoint() };
            if kind == Dialect::PostgreSql {
                let Err(Trouble::Broken(error)) = Session::connect(&endpoint(trust(&own))).await
                else {
                    panic!("{kind} has no TLS yet");
                };
                assert!(error.to_string().contains("no TLS"), "{kind}: {error}");
            }
            server.secure(&own.certificate, &own.key).unwrap();
            let mut session = Session::connect(&endpoint(trust(&own))).await.unwrap();
            let said = session.text(text, Duration::ZERO).await.unwrap();
            let cell = said.done[0].0.rows[0][0].clone().unwrap();
            assert!(cell.starts_with(b"TLS"), "{kind}: {cell:?}");
            // Requests to cancel a statement must work too.
            endpoint(trust(&own)).interrupt(session.interrupt()).await.unwrap();
            let Err(Trouble::Broken(error)) = Session::connect(&endpoint(trust(&other))).await
            else {
                panic!("{kind}: anybody is believed");
            };
            assert!(error.to_string().contains("TLS with"), "{kind}: {error}");
        }
    }

    #[tokio::test]
    async fn agents_must_show_who_they_are() {
        let directory = tempfile::tempdir().unwrap();
        let (own, other) =
            (files(&directory.path().join("own")), files(&directory.path().join("other")));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let tls = acceptor(&own.certificate, &own.key).unwrap();
        let xid = Xid { middleware: NodeId(1), epoch: 1, number: 1 };
        let word = Link::Word(FromAgent::RolledBack { xid });
        let hello = Link::Hello { node: NodeId(7), secret: "open sesame".into() };
        for (trust, is_believed) in [(trust(&own), true), (trust(&other), false), (None, false)] {
            let (heard, mut hearing) = tokio::sync::mpsc::unbounded_channel();
            let sender = link::call(address.clone(), hello.clone(), trust, Duration::ZERO, |_| {});
            let (tcp, _) = listener.accept().await.unwrap();
            let hear = move |caller, link| drop(heard.send((caller, link)));
            let answered = link::answer(tcp, Some(tls.clone()), "open sesame", hear).await;
            assert_eq!(answered.is_ok(), is_believed, "{:?}", answered.err());
            if is_believed {
                sender.send(word.clone());
                assert_eq!(hearing.recv().await, Some((NodeId(7), word.clone())));
            }
        }
    }
}
