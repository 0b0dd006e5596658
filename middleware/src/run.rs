//! The processes of a proxy and of an agent.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use orthodrome_core::NodeId;
use orthodrome_core::ordered::OrdMap;
use orthodrome_geotp::contract::PeerRollback;
use orthodrome_geotp::sql::SourceId;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::TcpListener;
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::catalogue::Catalogues;
use super::claim::{self, Begun, Claim, Claimant, Gate};
use super::config::{AgentConfig, ProxyConfig, SourceConfig};
use super::consensus::{Consensus, Store};
use super::discovery::Discovered;
use super::front::{Front, Speaks};
use super::host::{AgentHost, MiddlewareHost, Opened, Postbox, ToAgentLink};
use super::keys::Blocks;
use super::link::{self, Arrival, Sender};
use super::messages::Link;
use super::near::{Copies, Copy, Counts, Near};
use super::session::{Engine, Proxy};
use super::source::Source;
use orthodrome_server::Going;
use orthodrome_server::storage::StorageError;

/// Why a process ended, or did not start.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The process cannot listen at an address.
    #[error("{field}: cannot listen on {address}: {source}; is another process using it?")]
    Listen {
        /// The field of the file that contains the address.
        field: &'static str,
        /// The address.
        address: String,
        /// The cause.
        source: io::Error,
    },
    /// The decision log cannot be opened.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// An operation of the operating system failed.
    #[error("cannot start: {0}")]
    Io(#[from] io::Error),
    /// The certificate or its key is unusable.
    #[error("tls: {0}; give a certificate and its key in PEM")]
    Tls(String),
    /// Another proxy has its number.
    #[error("{0}")]
    Number(String),
    /// The process stopped because of an internal failure.
    #[error("the proxy has stopped: {0}")]
    Failed(String),
}

/// The addresses for clients.
#[derive(Clone, Copy, Debug, Default)]
pub struct Addresses {
    /// The address for PostgreSQL clients.
    pub postgresql: Option<SocketAddr>,
    /// The address for MySQL clients.
    pub mysql: Option<SocketAddr>,
}

async fn listen(field: &'static str, address: &str) -> Result<TcpListener, RunError> {
    TcpListener::bind(address).await.map_err(|source| RunError::Listen {
        field,
        address: address.to_owned(),
        source,
    })
}

pub(crate) fn acceptor(
    certificate: &std::path::Path,
    key: &std::path::Path,
) -> Result<TlsAcceptor, RunError> {
    let bad = |what: String| RunError::Tls(what);
    let chain: Result<Vec<CertificateDer<'static>>, _> = CertificateDer::pem_file_iter(certificate)
        .map_err(|e| bad(format!("{}: {e}", certificate.display())))?
        .collect();
    let chain = chain.map_err(|e| bad(format!("{}: {e}", certificate.display())))?;
    let key =
        PrivateKeyDer::from_pem_file(key).map_err(|e| bad(format!("{}: {e}", key.display())))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key))
        .map_err(|e| bad(e.to_string()))?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Runs a proxy until `stop` resolves. `ready` is called with the addresses for clients.
///
/// # Errors
/// See [`RunError`].
pub fn run_proxy(
    config: ProxyConfig,
    ready: impl FnOnce(Addresses) + Send + 'static,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Going<Result<(), RunError>> {
    going_proxy(config, Box::new(ready), Box::pin(stop))
}

/// Without type parameters, so that everything that a proxy does is compiled here and once, and not
/// in every program that calls [`run_proxy`].
fn going_proxy(
    config: ProxyConfig,
    ready: Box<dyn FnOnce(Addresses) + Send>,
    stop: Going<()>,
) -> Going<Result<(), RunError>> {
    Box::pin(proxy(config, ready, stop))
}

async fn proxy(
    config: ProxyConfig,
    ready: Box<dyn FnOnce(Addresses) + Send>,
    stop: Going<()>,
) -> Result<(), RunError> {
    let tls =
        config.tls.as_ref().map(|(certificate, key)| acceptor(certificate, key)).transpose()?;
    let mut listeners = Vec::new();
    let mut addresses = Addresses::default();
    if let Some(address) = &config.listen_postgresql {
        let listener = listen("listen.postgresql", address).await?;
        addresses.postgresql = Some(listener.local_addr()?);
        listeners.push((listener, Speaks::Postgres));
    }
    if let Some(address) = &config.listen_mysql {
        let listener = listen("listen.mysql", address).await?;
        addresses.mysql = Some(listener.local_addr()?);
        listeners.push((listener, Speaks::Mysql));
    }
    std::fs::create_dir_all(&config.data_dir)?;
    let ending = CancellationToken::new();
    let (failed, mut failure) = tokio::sync::mpsc::unbounded_channel();
    // Claims end with this function, in every case.
    let mut claims = JoinSet::new();
    let proxy = start(&config, &failed, &mut claims).await?;
    let front = Arc::new(Front::new(Arc::new(proxy), tls, config.users.clone()));
    let mut serving = JoinSet::new();
    for (listener, speaks) in listeners {
        serving.spawn(front.clone().listen(listener, speaks, ending.clone()));
    }
    info!(?addresses, "serving clients");
    ready(addresses);
    let outcome = tokio::select! {
        () = stop => Ok(()),
        why = failure.recv() => Err(RunError::Failed(why.unwrap_or_default())),
        served = serving.join_next() => match served {
            Some(Ok(Err(error))) => Err(RunError::Io(error)),
            _ => Err(RunError::Failed("a listener ended by itself".into())),
        },
    };
    ending.cancel();
    outcome
}

/// Starts the machines of a proxy.
async fn start(
    config: &ProxyConfig,
    failed: &UnboundedSender<String>,
    claims: &mut JoinSet<()>,
) -> Result<Proxy, RunError> {
    let mut direct: OrdMap<_, Arc<Source>> = OrdMap::new();
    let engine = match config.by_key {
        Some(name) => Engine::ByKey(start_by_key(config, name, &mut direct)?),
        None => Engine::Xa(start_xa(config, failed, &mut direct, claims).await?),
    };
    let mut by_distance: Vec<_> = config.sources.iter().map(|s| (s.emulated_rtt, s.id)).collect();
    by_distance.sort();
    let catalogue = config.catalogue.with_databases(config.databases());
    Ok(Proxy {
        catalogue: catalogue.clone(),
        discovered: Discovered::new(catalogue),
        catalogues: Catalogues::new(config.node.0, &config.databases(), config.shows_all),
        new_tables: config.new_tables,
        blocks: Blocks::default(),
        nodes: config.sources.iter().map(|s| (s.id, s.node)).collect(),
        by_distance: by_distance.into_iter().map(|(_, id)| id).collect(),
        direct,
        engine,
        isolation: config.isolation,
        writes_last: config.writes_last,
        databases: config.databases(),
        taken: std::sync::Mutex::default(),
        kinds: std::sync::Mutex::default(),
        sessions: std::sync::atomic::AtomicU64::new(0),
        near: config.is_near.then(|| near(config)),
    })
}

/// The copies that the mode `near` reads.
fn near(config: &ProxyConfig) -> Near {
    let copies = |source: &SourceConfig| {
        // There is no agent between the proxy and the source here, so the distance is the same.
        let own = Copy::new(source.endpoint.clone());
        (source.id, Copies { own, replica: source.replica.clone().map(Copy::new) })
    };
    Near {
        copies: config.sources.iter().map(copies).collect(),
        counts: Counts::default(),
        distrusted: std::sync::Mutex::default(),
    }
}

/// Starts the mode `scalardb`, in which sources need no agents.
fn start_by_key(
    config: &ProxyConfig,
    name: &'static str,
    direct: &mut OrdMap<SourceId, Arc<Source>>,
) -> Result<Consensus, RunError> {
    let mut stores = OrdMap::new();
    for source in &config.sources {
        let driver = Source::start(source.node, source.endpoint.clone(), None, |_| {});
        direct.insert(source.id, driver.clone());
        let kind = source.endpoint.kind;
        stores.insert(source.node, Store { source: driver, kind, rtt: source.emulated_rtt });
    }
    let lock_wait = config.sources.iter().map(|s| s.endpoint.lock_wait).max().unwrap_or_default();
    Ok(Consensus::start(config.node, name, lock_wait, stores)?)
}

/// Starts the middleware, agents for the sources that have none, and the links to the others.
async fn start_xa(
    config: &ProxyConfig,
    failed: &UnboundedSender<String>,
    direct: &mut OrdMap<SourceId, Arc<Source>>,
    kept: &mut JoinSet<()>,
) -> Result<MiddlewareHost, RunError> {
    let postbox = Postbox::new();
    // The proxy does nothing at a source before it knows that the number is its own.
    let opened = open(config, postbox.clone(), failed.clone()).await?;
    let gates: OrdMap<NodeId, Gate> =
        config.sources.iter().map(|source| (source.node, Gate::default())).collect();
    let gate = |node: NodeId| gates.get(&node).cloned().unwrap_or_default();
    let (opened, claims) = claim(config, opened, gate).await?;
    let mut links: OrdMap<NodeId, ToAgentLink> = OrdMap::new();
    // Agents inside this process find each other here.
    let inside: Arc<Mutex<OrdMap<NodeId, Arc<AgentHost>>>> = Arc::default();
    let mut peers: OrdMap<NodeId, Sender> = OrdMap::new();
    for source in &config.sources {
        let Some(address) = &source.agent else { continue };
        let (node, postbox) = (source.node, postbox.clone());
        let (heard, said) = (gate(node), gate(node));
        let hello = Link::Hello { node: config.node, secret: config.secret.clone() };
        let (trust, one_way) = (source.agent_trust.clone(), source.emulated_rtt / 2);
        let sender =
            link::call(address.clone(), hello, trust, one_way, move |arrival| match arrival {
                Arrival::Part => postbox.arriving(node),
                Arrival::Message(Link::Word(word)) if heard.is_open() => {
                    postbox.deliver(node, word)
                }
                Arrival::Message(_) => {}
            });
        peers.insert(node, sender.clone());
        let send = move |msg| {
            if said.is_open() {
                sender.send(Link::Order(msg));
            }
        };
        links.insert(node, Box::new(send));
        // These sessions are not the agent's: they are for queries outside of transactions.
        direct.insert(source.id, Source::start(node, source.endpoint.clone(), None, |_| {}));
    }
    for source in &config.sources {
        if source.agent.is_some() {
            continue;
        }
        let (node, postbox, inside_too, peers) =
            (source.node, postbox.clone(), inside.clone(), peers.clone());
        let (heard, said) = (gate(node), gate(node));
        let sessions = config.data_dir.join(format!("sessions-{node}"));
        let endpoint = source.endpoint.clone();
        let connect = move |report: Box<dyn Fn(_) + Send + Sync>| {
            Source::start(node, endpoint, Some(sessions), report)
        };
        let to_peer = move |to: NodeId, msg: PeerRollback| {
            let inside = inside_too.lock().unwrap_or_else(PoisonError::into_inner);
            match (inside.get(&to), peers.get(&to)) {
                (Some(agent), _) => agent.peer(msg),
                (None, Some(link)) => link.send(Link::Peer(msg)),
                (None, None) => {}
            }
        };
        let agent = AgentHost::start(
            node,
            config.agent.clone(),
            connect,
            move |_, word| {
                if heard.is_open() {
                    postbox.deliver(node, word);
                }
            },
            to_peer,
        )?;
        let agent = Arc::new(agent);
        direct.insert(source.id, agent.source.clone());
        inside.lock().unwrap_or_else(PoisonError::into_inner).insert(node, agent.clone());
        let me = config.node;
        let send = move |msg| {
            if said.is_open() {
                agent.deliver(me, msg);
            }
        };
        links.insert(node, Box::new(send));
    }
    let (begins, begun) = tokio::sync::watch::channel(0);
    let machine = config.middleware.clone();
    let host = MiddlewareHost::start(config.node, machine, opened, links, begins)?;
    *kept = claim::keep(claims, &begun, failed);
    Ok(host)
}

/// Recovers the decision log.
async fn open(
    config: &ProxyConfig,
    postbox: Postbox,
    failed: UnboundedSender<String>,
) -> Result<Opened, RunError> {
    let (name, data_dir, node) =
        (config.name.clone(), config.data_dir.join("decisions"), config.node);
    let opened = tokio::task::spawn_blocking(move || {
        Opened::open(node, &name, &data_dir, postbox, move |why| {
            // The receiver is gone if the process is ending.
            let _ = failed.send(why);
        })
    });
    Ok(opened.await.map_err(|error| RunError::Failed(error.to_string()))??)
}

/// Claims the proxy's number at every reachable source.
async fn claim(
    config: &ProxyConfig,
    mut opened: Opened,
    gate: impl Fn(NodeId) -> Gate,
) -> Result<(Opened, Vec<Begun>), RunError> {
    let life = opened.life();
    let claimant =
        Claimant::new(config.node, &config.name, opened.log.clone(), life, config.takes_over);
    let claimant = Arc::new(claimant);
    let claim = |source: &SourceConfig| {
        let name = config.catalogue.source(source.id).map_or_else(String::new, |s| s.name.clone());
        Claim::new(name, source.node, &source.endpoint, claimant.clone(), gate(source.node))
    };
    let claims = config.sources.iter().map(claim).collect();
    let (claims, highest) = claim::begin(claims).await.map_err(RunError::Number)?;
    if highest > life {
        opened.skip_to(highest);
    }
    Ok((opened, claims))
}

/// Runs an agent until `stop` resolves. `ready` is called with its address.
///
/// # Errors
/// See [`RunError`].
pub fn run_agent(
    config: AgentConfig,
    ready: impl FnOnce(SocketAddr) + Send + 'static,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Going<Result<(), RunError>> {
    going_agent(config, Box::new(ready), Box::pin(stop))
}

/// As [`going_proxy`].
fn going_agent(
    config: AgentConfig,
    ready: Box<dyn FnOnce(SocketAddr) + Send>,
    stop: Going<()>,
) -> Going<Result<(), RunError>> {
    Box::pin(agent(config, ready, stop))
}

async fn agent(
    config: AgentConfig,
    ready: Box<dyn FnOnce(SocketAddr) + Send>,
    stop: Going<()>,
) -> Result<(), RunError> {
    let tls =
        config.tls.as_ref().map(|(certificate, key)| acceptor(certificate, key)).transpose()?;
    let listener = listen("listen", &config.listen).await?;
    std::fs::create_dir_all(&config.data_dir)?;
    let masters: Arc<Mutex<OrdMap<NodeId, Sender>>> = Arc::default();
    let hello = Link::Hello { node: NodeId(0), secret: config.secret.clone() };
    let peers: OrdMap<NodeId, Sender> = config
        .peers
        .iter()
        .map(|(node, peer)| {
            let one_way = peer.emulated_rtt / 2;
            let trust = peer.trust.clone();
            (*node, link::call(peer.address.clone(), hello.clone(), trust, one_way, |_| {}))
        })
        .collect();
    let (node, endpoint) = (config.node, config.endpoint.clone());
    let sessions = config.data_dir.join(format!("sessions-{node}"));
    let known = masters.clone();
    let agent = AgentHost::start(
        node,
        config.agent.clone(),
        move |report| Source::start(node, endpoint, Some(sessions), report),
        move |to, word| {
            if let Some(link) = known.lock().unwrap_or_else(PoisonError::into_inner).get(&to) {
                link.send(Link::Word(word));
            }
        },
        move |to, msg| {
            if let Some(link) = peers.get(&to) {
                link.send(Link::Peer(msg));
            }
        },
    )?;
    let agent = Arc::new(agent);
    let address = listener.local_addr()?;
    info!(%address, "serving middlewares");
    ready(address);
    let serving = async {
        loop {
            let Ok((tcp, from)) = listener.accept().await else {
                tokio::time::sleep(orthodrome_server::socket::ACCEPT_PAUSE).await;
                continue;
            };
            let Some(files) = orthodrome_server::socket::admit() else { continue };
            let (agent, masters, secret) = (agent.clone(), masters.clone(), config.secret.clone());
            let tls = tls.clone();
            tokio::spawn(async move {
                // Only callers that have not shown the secret yet are counted.
                let _files = files;
                let hear = move |caller: NodeId, link: Link| match link {
                    Link::Order(order) => agent.deliver(caller, order),
                    Link::Peer(msg) => agent.peer(msg),
                    Link::Word(_) | Link::Hello { .. } => {}
                };
                match link::answer(tcp, tls, &secret, hear).await {
                    Ok((caller, sender)) if caller != NodeId(0) => {
                        masters
                            .lock()
                            .unwrap_or_else(PoisonError::into_inner)
                            .insert(caller, sender);
                    }
                    // Other agents only send.
                    Ok(_) => {}
                    Err(error) => warn!(%from, "refused a connection: {error}"),
                }
            });
        }
    };
    tokio::select! {
        () = stop => {}
        () = serving => {}
    }
    Ok(())
}
