//! TLS between nodes: both ends show a certificate for that node, signed by the cluster's
//! authority.
//!
//! The certificate of node `n3` of cluster `planet` names `n3.planet.orthodrome`. The connecting
//! end checks the name of the node that it wants. The accepting end checks the name of the node
//! that the other end claims to be. So a node with a valid certificate cannot pass for another
//! node.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use orthodrome_core::NodeId;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// PEM files.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TlsFiles {
    /// The node's certificate, followed by intermediate certificates up to the authority.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Certificates of the cluster's authority.
    pub authority: PathBuf,
}

/// Why TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file is missing, unreadable, or not PEM.
    #[error("cannot read {what} {}: {why}; check `tls` in the node's file", path.display())]
    File {
        /// The expected contents.
        what: &'static str,
        /// The path of the file.
        path: PathBuf,
        /// The problem.
        why: String,
    },
    /// The files are inconsistent.
    #[error("the certificate and key cannot be used: {0}; issue new ones for this node")]
    Config(#[from] rustls::Error),
    /// The authority's certificates are unusable.
    #[error("the authority's certificates cannot be used: {0}")]
    Verifier(#[from] rustls::server::VerifierBuilderError),
    /// The certificate is for another node.
    #[error("the certificate {} is not for {name}; use the certificate of this node", path.display())]
    Name {
        /// The certificate's file.
        path: PathBuf,
        /// The missing name.
        name: String,
    },
    /// Making a certificate failed.
    #[error("cannot make a certificate: {0}")]
    Make(#[from] rcgen::Error),
    /// A file cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
}

/// Both ends of TLS for one node.
#[derive(Clone)]
pub struct Tls {
    /// For incoming connections.
    pub acceptor: TlsAcceptor,
    /// For outgoing connections.
    pub connector: TlsConnector,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

/// The name in the certificate of a node.
#[must_use]
pub fn node_name(cluster: &str, node: NodeId) -> String {
    format!("{node}.{cluster}.orthodrome")
}

fn certificates(what: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let file = |why: String| TlsError::File { what, path: path.to_owned(), why };
    let found: Result<Vec<_>, _> =
        CertificateDer::pem_file_iter(path).map_err(|e| file(e.to_string()))?.collect();
    let found = found.map_err(|e| file(e.to_string()))?;
    if found.is_empty() { Err(file("it holds no certificate".into())) } else { Ok(found) }
}

/// The first certificate of a file, in DER.
///
/// # Errors
/// The file cannot be read, or contains no certificate.
pub fn leaf(path: &Path) -> Result<Vec<u8>, TlsError> {
    let all = certificates("the certificate", path)?;
    Ok(all.first().map(|leaf| leaf.to_vec()).unwrap_or_default())
}

impl Tls {
    /// Loads the files and checks that they match each other and `node`.
    ///
    /// # Errors
    /// See [`TlsError`].
    pub fn load(files: &TlsFiles, cluster: &str, node: NodeId) -> Result<Self, TlsError> {
        let chain = certificates("the certificate", &files.certificate)?;
        let key = PrivateKeyDer::from_pem_file(&files.key).map_err(|error| TlsError::File {
            what: "the private key",
            path: files.key.clone(),
            why: error.to_string(),
        })?;
        let mut roots = RootCertStore::empty();
        for certificate in certificates("the authority's certificate", &files.authority)? {
            roots.add(certificate)?;
        }
        let roots = Arc::new(roots);
        let own = chain.first().ok_or_else(|| TlsError::Name {
            path: files.certificate.clone(),
            name: node_name(cluster, node),
        })?;
        is_for(own, cluster, node).map_err(|_| TlsError::Name {
            path: files.certificate.clone(),
            name: node_name(cluster, node),
        })?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build()?;
        let server = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), key.clone_key())?;
        let client = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)?;
        Ok(Self {
            acceptor: TlsAcceptor::from(Arc::new(server)),
            connector: TlsConnector::from(Arc::new(client)),
        })
    }
}

/// Checks that a certificate, whose chain was verified before, is that of `node`.
///
/// # Errors
/// The name in the certificate.
pub fn is_for(certificate: &CertificateDer<'_>, cluster: &str, node: NodeId) -> Result<(), String> {
    let parsed = ParsedCertificate::try_from(certificate).map_err(|e| e.to_string())?;
    let name = server_name(cluster, node)?;
    rustls::client::verify_server_name(&parsed, &name)
        .map_err(|_| format!("not made for {}", node_name(cluster, node)))
}

/// The expected name when connecting to `node`.
///
/// # Errors
/// The cluster's id cannot be part of a name.
pub fn server_name(cluster: &str, node: NodeId) -> Result<ServerName<'static>, String> {
    ServerName::try_from(node_name(cluster, node)).map_err(|error| error.to_string())
}

/// A certificate authority for one cluster: for tests, demonstrations, and clusters whose operator
/// has no authority.
pub struct Authority {
    cluster: String,
    issuer: rcgen::Issuer<'static, rcgen::KeyPair>,
    certificate: String,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").field("cluster", &self.cluster).finish_non_exhaustive()
    }
}

impl Authority {
    /// Makes a new authority with a new key.
    ///
    /// # Errors
    /// The system provides no randomness.
    pub fn new(cluster: &str) -> Result<Self, TlsError> {
        let mut params = rcgen::CertificateParams::default();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let name = format!("Orthodrome cluster {cluster}");
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        let key = rcgen::KeyPair::generate()?;
        let certificate = params.self_signed(&key)?.pem();
        let issuer = rcgen::Issuer::new(params, key);
        Ok(Self { cluster: cluster.into(), issuer, certificate })
    }

    /// Writes `ca.pem`, `n<id>.pem` and `n<id>.key` into `dir`, the key readable by its owner only.
    /// Clients may verify the node by its name or by any of `hosts` (names or addresses).
    ///
    /// # Errors
    /// A file cannot be written, or a host is not a name.
    pub fn issue(&self, dir: &Path, node: NodeId, hosts: &[String]) -> Result<TlsFiles, TlsError> {
        let names: Vec<String> =
            [node_name(&self.cluster, node)].into_iter().chain(hosts.iter().cloned()).collect();
        let mut params = rcgen::CertificateParams::new(names)?;
        params.distinguished_name.push(rcgen::DnType::CommonName, node.to_string());
        params.extended_key_usages = vec![
            rcgen::ExtendedKeyUsagePurpose::ServerAuth,
            rcgen::ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let key = rcgen::KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?.pem();
        let files = TlsFiles {
            certificate: dir.join(format!("{node}.pem")),
            key: dir.join(format!("{node}.key")),
            authority: dir.join("ca.pem"),
        };
        write(&files.authority, &self.certificate, 0o644)?;
        write(&files.certificate, &certificate, 0o644)?;
        write(&files.key, &key.serialize_pem(), 0o600)?;
        Ok(files)
    }
}

fn write(path: &Path, text: &str, mode: u32) -> Result<(), TlsError> {
    use std::io::Write as _;
    use std::os::unix::fs::OpenOptionsExt as _;
    fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(mode)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .map_err(|source| TlsError::Write { path: path.to_owned(), source })
}
