//! The client: one incarnation, which the cluster knows by its id.

use std::future::IntoFuture;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use orthodrome_core::cluster::{Cluster, Node, Partition, Partitioning, Role};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::session::Session;
use orthodrome_core::topology::Topology;
use orthodrome_core::txn::{Key, Op, Priority};
use orthodrome_core::{ClientId, NodeId, PartitionId, RegionId, Timestamp};
use prost::Message;
use tokio::time::Instant;

use crate::attempt::Recorder;
use crate::gateway::{Failure, Gateways, Stubs};
use crate::names::{Name, Names};
use crate::outcome::{AbortReason, Aborted, Committed, InDoubt, Outcome};
use crate::pace::Pace;
use crate::txn::Transaction;
use crate::values::{Reads, Writes};
use crate::wire::{self, Ended, api};
use crate::{Config, Error};

/// The interval between checks whether the nearest gateway is reachable again.
const FAILBACK_INTERVAL: Duration = Duration::from_secs(5);

/// A client of one cluster. Clones are cheap handles to the same client.
#[derive(Clone, Debug)]
pub struct Client {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    id: ClientId,
    pub(crate) gateways: Gateways,
    /// By gateway that registered this client: each takes only names that it gave.
    names: Mutex<OrdMap<usize, Names>>,
    pub(crate) limits: api::Limits,
    pub(crate) deadline: Duration,
    pub(crate) recorder: Recorder,
    /// True if the keyspace's protocol runs general transactions.
    pub(crate) runs_general: bool,
    /// What this client already knows; later reads must not show anything older.
    session: Mutex<Session>,
    probing: AtomicBool,
}

impl Client {
    /// Registers at the first gateway that answers, in the order of the configuration.
    ///
    /// # Errors
    /// [`Error::Config`], [`Error::Unauthenticated`] and [`Error::PermissionDenied`] at once;
    /// [`Error::Unreachable`] or [`Error::Busy`] if no gateway registered the client before the
    /// deadline.
    pub async fn connect(config: Config) -> Result<Self, Error> {
        let gateways = Gateways::new(&config)?;
        let mut pace = Pace::new(config.deadline);
        let mut at = 0;
        loop {
            let answer =
                gateways.send(at, pace.deadline, api::RegisterRequest {}, Stubs::register).await;
            let failure = match answer {
                Ok(registered) => return Self::registered(gateways, at, registered, &config),
                Err(Failure::Never(error)) => return Err(error),
                // Registering twice does no harm.
                Err(Failure::Lost(text) | Failure::NotOpen(text) | Failure::Unregistered(text)) => {
                    Failure::Unavailable(text)
                }
                Err(failure) => failure,
            };
            at = gateways.after(at);
            // Every gateway is tried before the first pause.
            if (at == 0 && !pace.pause().await) || Instant::now() >= pace.deadline {
                return Err(failure.into_error());
            }
        }
    }

    fn registered(
        gateways: Gateways,
        at: usize,
        registered: api::RegisterResponse,
        config: &Config,
    ) -> Result<Self, Error> {
        let (Some(limits), Some(about)) = (registered.limits, registered.cluster) else {
            return Err(Error::Unexpected("registered without limits or cluster".into()));
        };
        gateways.met(at, &about).map_err(Failure::into_error)?;
        gateways.set_limits(&limits);
        gateways.prefer(at);
        let id = ClientId(registered.client);
        let names = Mutex::new(OrdMap::from([(at, Names::new(id))]));
        let runs_general = about.keyspaces.first().is_some_and(|keyspace| keyspace.general);
        let inner = Inner {
            id,
            gateways,
            names,
            limits,
            deadline: config.deadline,
            recorder: config.recorder.clone(),
            runs_general,
            session: Mutex::default(),
            probing: AtomicBool::new(false),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The id under which the first gateway registered this incarnation: the first part of the names of
    /// its transactions there. At every other gateway it has another id.
    #[must_use]
    pub fn id(&self) -> ClientId {
        self.inner.id
    }

    /// Declares an interactive transaction: the keys that it reads, and the keys that it may write.
    pub fn transaction(&self) -> Transaction {
        Transaction::new(Arc::clone(&self.inner))
    }

    /// Runs guarded operations as one transaction. Await the result.
    ///
    /// ```no_run
    /// # async fn example(client: orthodrome_client::Client) -> Result<(), orthodrome_client::Error> {
    /// use orthodrome_client::Op;
    /// // Take a seat, if it is free, and count it.
    /// let outcome = client
    ///     .execute([
    ///         Op::Compare("seat/12a".into(), None),
    ///         Op::Put("seat/12a".into(), "ada".into()),
    ///         Op::Add("seats-taken".into(), 1),
    ///     ])
    ///     .await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn execute(&self, ops: impl IntoIterator<Item = Op>) -> Execute {
        Execute {
            client: Arc::clone(&self.inner),
            ops: ops.into_iter().collect(),
            priority: Priority::LOW,
            deadline: self.inner.deadline,
        }
    }

    /// Reads keys as of one consistent snapshot. Await the result.
    ///
    /// ```no_run
    /// # async fn example(client: orthodrome_client::Client) -> Result<(), orthodrome_client::Error> {
    /// let snapshot = client.read(["a", "b"]).await?;
    /// println!("a is {:?} as of {}", snapshot.reads.text("a"), snapshot.timestamp);
    /// # Ok(())
    /// # }
    /// ```
    pub fn read<K: Into<Key>>(&self, keys: impl IntoIterator<Item = K>) -> Query {
        let keys = keys.into_iter().map(Into::into).collect();
        Query::new(&self.inner, keys, Priority::LOW, self.inner.deadline)
    }

    /// Describes the cluster, as the gateway in use sees it.
    ///
    /// # Errors
    /// [`Error::Unreachable`] or [`Error::Deadline`] if no gateway answered in time.
    pub async fn describe(&self) -> Result<ClusterInfo, Error> {
        let mut pace = Pace::new(self.inner.deadline);
        loop {
            let at = self.inner.gateways.current();
            let request = api::DescribeRequest {};
            match self.inner.gateways.send(at, pace.deadline, request, Stubs::describe).await {
                Ok(about) => return Ok(ClusterInfo::from_api(about)),
                Err(failure) => self.inner.after_failure(at, failure, &mut pace).await?,
            }
        }
    }
}

impl Inner {
    /// The gateway at which to begin a transaction, its region, and the names for it. Registers there, if
    /// this client has not done so.
    pub(crate) async fn home(
        self: &Arc<Self>,
        pace: &mut Pace,
    ) -> Result<(usize, RegionId, Names), Error> {
        self.look_for_nearest();
        loop {
            let at = self.gateways.current();
            let home = match self.gateways.region(at, pace.deadline).await {
                Ok(region) => self.names_at(at, pace.deadline).await.map(|names| (region, names)),
                Err(failure) => Err(failure),
            };
            match home {
                Ok((region, names)) => return Ok((at, region, names)),
                Err(failure) => self.after_failure(at, failure, pace).await?,
            }
        }
    }

    async fn names_at(&self, at: usize, deadline: Instant) -> Result<Names, Failure> {
        if let Some(names) = self.names().get(&at) {
            return Ok(names.clone());
        }
        let registered =
            self.gateways.send(at, deadline, api::RegisterRequest {}, Stubs::register).await?;
        // If two tasks register at once, both use what the first one got.
        let names = Names::new(ClientId(registered.client));
        Ok(self.names().entry(at).or_insert(names).clone())
    }

    fn names(&self) -> MutexGuard<'_, OrdMap<usize, Names>> {
        // No code that holds the lock can leave it half changed.
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A name for a transaction that will begin somewhere.
    pub(crate) fn take_name(&self) -> Name {
        let names = self.names();
        let names = names.get(&self.gateways.current()).or_else(|| names.values().next()).cloned();
        names.unwrap_or_else(|| Names::new(self.id)).take()
    }

    /// Handles a failure that had no effect: pauses, and changes the gateway if that can help.
    pub(crate) async fn after_failure(
        &self,
        at: usize,
        failure: Failure,
        pace: &mut Pace,
    ) -> Result<(), Error> {
        match &failure {
            Failure::Never(_) => return Err(failure.into_error()),
            Failure::Busy(_) => {}
            Failure::Unregistered(_) => drop(self.names().remove(&at)),
            Failure::Unavailable(_) | Failure::NotOpen(_) | Failure::Lost(_) => {
                self.gateways.leave(at);
            }
        }
        if pace.pause().await { Ok(()) } else { Err(failure.into_error()) }
    }

    /// While the client uses another gateway than the nearest, checks in the background whether the
    /// nearest answers again.
    fn look_for_nearest(self: &Arc<Self>) {
        if self.gateways.current() == 0 || self.probing.swap(true, Ordering::Relaxed) {
            return;
        }
        let client = Arc::downgrade(self);
        tokio::spawn(async move {
            tokio::time::sleep(FAILBACK_INTERVAL).await;
            let Some(client) = client.upgrade() else { return };
            let deadline = Instant::now() + FAILBACK_INTERVAL;
            let about =
                client.gateways.send(0, deadline, api::DescribeRequest {}, Stubs::describe).await;
            if about.is_ok_and(|about| client.gateways.met(0, &about).is_ok()) {
                client.gateways.prefer(0);
            }
            client.probing.store(false, Ordering::Relaxed);
        });
    }

    /// Asks one gateway after the other for a transaction's outcome, starting after gateway
    /// `avoid`, until one knows it, the cluster has forgotten it, or the deadline passes. If the
    /// client has not decided, nobody asked to commit the transaction. Then it has no effect, even
    /// if no gateway knows it.
    pub(crate) async fn ask(
        &self,
        question: &api::ResolveRequest,
        avoid: Option<usize>,
        pace: &mut Pace,
    ) -> Ended {
        let mut at = avoid.map_or_else(|| self.gateways.current(), |at| self.gateways.after(at));
        let mut asked = 0;
        let mut forgotten = None;
        loop {
            let answer =
                self.gateways.send(at, pace.deadline, question.clone(), Stubs::resolve).await;
            let says_forgotten =
                answer.as_ref().is_ok_and(|answer| wire::is_forgotten(answer.outcome.as_ref()));
            let trouble = match answer {
                Ok(answer) => match wire::ended(answer.outcome) {
                    Ended::Unknown(_) if wire::is_undecided(question) => {
                        return Ended::Aborted(Aborted::undecided());
                    }
                    Ended::Unknown(trouble) => trouble,
                    known @ (Ended::Committed(_) | Ended::Aborted(_)) => {
                        if avoid.is_some_and(|avoided| avoided == self.gateways.current()) {
                            self.gateways.prefer(at);
                        }
                        return known;
                    }
                },
                Err(Failure::Never(error)) => error.to_string(),
                Err(
                    Failure::Busy(text)
                    | Failure::Unavailable(text)
                    | Failure::NotOpen(text)
                    | Failure::Unregistered(text)
                    | Failure::Lost(text),
                ) => text,
            };
            at = self.gateways.after(at);
            asked += 1;
            if says_forgotten {
                forgotten = Some(trouble.clone());
            }
            // Every gateway is asked before the first pause.
            let all_asked = asked % self.gateways.len() == 0;
            if let Some(trouble) = forgotten.take_if(|_| all_asked) {
                return Ended::Unknown(trouble);
            }
            if (all_asked && !pace.pause().await) || Instant::now() >= pace.deadline {
                return Ended::Unknown(trouble);
            }
        }
    }

    pub(crate) fn session(&self) -> MutexGuard<'_, Session> {
        // No code that holds the lock can leave it half changed.
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What this client knows about these keys.
    pub(crate) fn known(&self, keys: &[bytes::Bytes]) -> Vec<api::KnownKey> {
        let keys: Vec<Key> = keys.iter().map(Key::from).collect();
        let floors = self.session().floors_of(&keys).into_iter();
        let known = floors.map(|(key, floor)| api::KnownKey {
            key: key.to_bytes(),
            timestamp: floor.timestamp.0,
            deleted: floor.is_deletion,
        });
        known.collect()
    }

    /// True if some of these reads are older than what this client knows.
    pub(crate) fn knows_more_than(&self, reads: &Reads) -> bool {
        self.session().is_ahead_of(&reads.0)
    }

    /// Records that a transaction with these reads and writes has committed.
    pub(crate) fn learn_commit(&self, at: Timestamp, reads: Option<&Reads>, writes: &Writes) {
        let mut session = self.session();
        session.wrote(at, &writes.0);
        if let Some(reads) = reads {
            session.read(&reads.0);
        }
    }

    /// Records that a procedure has committed.
    fn learn_procedure(&self, at: Timestamp, reads: Option<&Reads>, ops: &[Op]) {
        let mut session = self.session();
        session.ran(at, ops);
        if let Some(reads) = reads {
            session.read(&reads.0);
        }
    }

    /// Refuses a request that is too large for the gateway to receive.
    pub(crate) fn check_size(&self, request: &impl Message) -> Result<(), Error> {
        let (have, most) = (request.encoded_len(), self.limits.request_bytes_max);
        if have > most as usize {
            let text = format!("the request takes {have} bytes; at most {most} are allowed");
            return Err(Error::Invalid(text));
        }
        Ok(())
    }
}

/// A procedure to run. Set its options, then await it.
///
/// # Errors
/// [`Error`]. A failed guard is not an error but [`Outcome::Aborted`].
#[derive(Debug)]
#[must_use = "nothing runs before it is awaited"]
pub struct Execute {
    client: Arc<Inner>,
    ops: Vec<Op>,
    priority: Priority,
    deadline: Duration,
}

impl Execute {
    /// Sets the priority. The default is low.
    pub fn priority(mut self, priority: Priority) -> Self {
        self.priority = priority;
        self
    }

    /// Sets the deadline, retries included.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    async fn run(self) -> Result<Outcome, Error> {
        let Self { client, ops, priority, deadline } = self;
        let mut pace = Pace::new(deadline);
        let mut name = client.take_name();
        let mut request = api::ExecuteRequest {
            ops: ops.iter().cloned().map(wire::op).collect(),
            priority: wire::priority(priority)?,
            ..Default::default()
        };
        client.check_size(&request)?;
        loop {
            let (at, home, names) = client.home(&mut pace).await?;
            name.begin_at(&names, home);
            request.txn = wire::txn_id(name.id());
            request.home_region = home.0.into();
            request.acknowledged_below = names.acknowledged_below();
            let began = std::time::Instant::now();
            let answer =
                client.gateways.send(at, pace.deadline, request.clone(), Stubs::execute).await;
            let ended = match answer {
                Ok(answer) => match wire::ended(answer.outcome) {
                    ended @ Ended::Committed(timestamp) => {
                        let reads = (!answer.reads_omitted).then(|| wire::reads(answer.reads));
                        client.learn_procedure(timestamp, reads.as_ref(), &ops);
                        client.recorder.record(
                            name.id(),
                            home,
                            began,
                            &ended,
                            reads.as_ref(),
                            false,
                        );
                        return Ok(Outcome::Committed(Committed { timestamp, reads }));
                    }
                    Ended::Unknown(_) => {
                        name.was_resolved();
                        client.ask(&question(&request), None, &mut pace).await
                    }
                    aborted @ Ended::Aborted(_) => aborted,
                },
                Err(Failure::Lost(_) | Failure::NotOpen(_)) => {
                    name.was_resolved();
                    client.ask(&question(&request), Some(at), &mut pace).await
                }
                Err(failure) => {
                    client.after_failure(at, failure, &mut pace).await?;
                    continue;
                }
            };
            if let Ended::Committed(at) = ended {
                client.learn_procedure(at, None, &ops);
            }
            client.recorder.record(name.id(), home, began, &ended, None, false);
            if let Some(outcome) = conclude(ended, &mut pace, || InDoubt {
                client: Arc::clone(&client),
                name: name.clone(),
                question: Box::new(question(&request)),
                reads: None,
                trouble: String::new(),
            })
            .await
            {
                return Ok(outcome);
            }
            name.retry();
        }
    }
}

fn question(request: &api::ExecuteRequest) -> api::ResolveRequest {
    let begun = Some(api::resolve_request::Begun::Procedure(request.clone()));
    api::ResolveRequest { begun, ..Default::default() }
}

impl IntoFuture for Execute {
    type Output = Result<Outcome, Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}

/// Keys to read. Set the options, then await it.
///
/// # Errors
/// [`Error`].
#[derive(Debug)]
#[must_use = "nothing is read before it is awaited"]
pub struct Query {
    client: Arc<Inner>,
    keys: Vec<Key>,
    priority: Priority,
    deadline: Duration,
    is_stale: bool,
}

/// The values of keys at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Snapshot {
    /// The moment.
    pub timestamp: Timestamp,
    /// One entry for each key.
    pub reads: Reads,
}

impl Query {
    pub(crate) fn new(
        client: &Arc<Inner>,
        keys: Vec<Key>,
        priority: Priority,
        deadline: Duration,
    ) -> Self {
        Self { client: Arc::clone(client), keys, priority, deadline, is_stale: false }
    }

    /// Sets the priority. The default is low.
    pub fn priority(mut self, priority: Priority) -> Self {
        self.priority = priority;
        self
    }

    /// Sets the deadline, retries included.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Accepts any consistent snapshot, however old: the state of the nearest replica, without a
    /// message to another region. The snapshot shows all of a transaction or nothing of it, and
    /// also everything that the transaction itself had read. It shows nothing older than this
    /// client knows. It may miss commits that were acknowledged to other clients, and two such
    /// reads may disagree about the order of two independent transactions. Only the protocols that
    /// order transactions before they run them (`calvin`, `slog`, `sloth`) have a shorter path for
    /// it.
    pub fn stale(mut self) -> Self {
        self.is_stale = true;
        self
    }

    async fn run(mut self) -> Result<Snapshot, Error> {
        self.keys.sort_unstable();
        self.keys.dedup();
        let Self { client, keys, priority, deadline, is_stale } = self;
        let mut pace = Pace::new(deadline);
        let mut name = client.take_name();
        let mut request = api::ReadRequest {
            stale: is_stale,
            keys: wire::keys(keys),
            priority: wire::priority(priority)?,
            ..Default::default()
        };
        client.check_size(&request)?;
        loop {
            let (at, home, names) = client.home(&mut pace).await?;
            name.begin_at(&names, home);
            request.txn = wire::txn_id(name.id());
            request.home_region = home.0.into();
            request.acknowledged_below = names.acknowledged_below();
            if is_stale {
                request.session = client.known(&request.keys);
                if client.check_size(&request).is_err() {
                    // The client checks here in any case that nothing it reads is too old.
                    request.session.clear();
                }
            }
            let began = std::time::Instant::now();
            let answer =
                client.gateways.send(at, pace.deadline, request.clone(), Stubs::read).await;
            match answer {
                Ok(answer) => match wire::ended(answer.outcome) {
                    ended @ Ended::Committed(timestamp) => {
                        let reads = wire::reads(answer.reads);
                        let is_behind = match is_stale {
                            true => client.knows_more_than(&reads),
                            false => client.session().is_ahead_of_snapshot(&reads.0, timestamp),
                        };
                        if is_behind {
                            // The gateway does not compare reads with what clients know.
                            if !pace.pause().await {
                                return Err(Error::Aborted(AbortReason::StaleRead));
                            }
                            name.retry();
                            continue;
                        }
                        client.learn_commit(timestamp, Some(&reads), &Writes::new());
                        client.recorder.record(name.id(), home, began, &ended, Some(&reads), true);
                        return Ok(Snapshot { timestamp, reads });
                    }
                    Ended::Aborted(aborted) => {
                        let ended = Ended::Aborted(aborted.clone());
                        client.recorder.record(name.id(), home, began, &ended, None, true);
                        if !aborted.retryable || !pace.pause().await {
                            return Err(Error::Aborted(aborted.reason));
                        }
                    }
                    Ended::Unknown(text) => {
                        client.after_failure(at, Failure::Lost(text), &mut pace).await?;
                    }
                },
                Err(failure) => client.after_failure(at, failure, &mut pace).await?,
            }
            // A read has no effect, so it may be retried after any failure, under the next name.
            name.retry();
        }
    }
}

impl IntoFuture for Query {
    type Output = Result<Snapshot, Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}

/// The outcome to report; none if the next attempt may succeed before the deadline.
pub(crate) async fn conclude(
    ended: Ended,
    pace: &mut Pace,
    doubt: impl FnOnce() -> InDoubt,
) -> Option<Outcome> {
    match ended {
        Ended::Committed(timestamp) => {
            Some(Outcome::Committed(Committed { timestamp, reads: doubt().reads }))
        }
        Ended::Aborted(aborted) => {
            let again = aborted.retryable && pace.pause().await;
            (!again).then_some(Outcome::Aborted(aborted))
        }
        Ended::Unknown(trouble) => Some(Outcome::Unknown(InDoubt { trouble, ..doubt() })),
    }
}

/// The abort of the previous attempt of a transaction that is retried.
#[derive(Default, Debug)]
pub(crate) struct LastAbort(pub(crate) Option<Aborted>);

impl LastAbort {
    pub(crate) fn note(&mut self, ended: &Ended) {
        if let Ended::Aborted(aborted) = ended {
            self.0 = Some(aborted.clone());
        }
    }

    /// The result of an attempt that has ended with this error, so nothing was committed. If the
    /// deadline has passed in the middle of it, the previous attempt's abort says more about why.
    pub(crate) fn instead_of(&mut self, error: Error) -> Result<Outcome, Error> {
        match (error, self.0.take()) {
            (Error::Deadline(_), Some(aborted)) => Ok(Outcome::Aborted(aborted)),
            (error, _) => Err(error),
        }
    }
}

/// A gateway's description of its cluster.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClusterInfo {
    /// The cluster's name.
    pub cluster: String,
    /// The number of the placement; every change of the placement increases it.
    pub epoch: u64,
    /// The region of the gateway in use.
    pub region: RegionId,
    /// All regions, by id.
    pub regions: Vec<RegionInfo>,
    /// All nodes, by id.
    pub nodes: Vec<NodeInfo>,
    /// Partitions with the nodes that hold them, the preferred leader first.
    pub partitions: Vec<PartitionInfo>,
    /// Keyspaces.
    pub keyspaces: Vec<KeyspaceInfo>,
    /// The placement, which says which partition holds a key; none if the gateway is too old to
    /// describe how keys map to partitions.
    pub map: Option<Cluster>,
}

/// One region.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RegionInfo {
    /// The region's name.
    pub name: String,
    /// Round trip to each region, by region id.
    pub rtt: Vec<Duration>,
}

/// One node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NodeInfo {
    /// The node's id.
    pub id: NodeId,
    /// The node's region.
    pub region: RegionId,
    /// True if the node serves clients; false if it holds replicas.
    pub is_gateway: bool,
}

/// One partition.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PartitionInfo {
    /// The partition's id.
    pub id: PartitionId,
    /// The nodes with a replica according to the cluster's configuration, the preferred leader
    /// first.
    pub placed: Vec<NodeId>,
    /// The members that vote now, as far as the gateway's node knows. Empty if it knows of no
    /// change since the configuration, or if the protocol's replicas do not vote.
    pub voters: Vec<NodeId>,
    /// The members that receive data but do not vote.
    pub learners: Vec<NodeId>,
    /// The member that leads now, if the gateway's node knows.
    pub leader: Option<NodeId>,
}

/// One keyspace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KeyspaceInfo {
    /// The keyspace's name.
    pub name: String,
    /// The protocol that commits its transactions.
    pub protocol: String,
    /// Its guarantee: `strict serializability`, or `serializability`.
    pub guarantee: String,
    /// True if it runs general transactions. Otherwise this library uses reconnaissance.
    pub general: bool,
}

impl ClusterInfo {
    fn from_api(about: api::DescribeResponse) -> Self {
        let region = |region: api::Region| RegionInfo {
            name: region.name,
            rtt: region.rtt_us.into_iter().map(Duration::from_micros).collect(),
        };
        let region_id = |region| RegionId(u16::try_from(region).unwrap_or(u16::MAX));
        let node = |node: api::Node| NodeInfo {
            id: NodeId(node.id),
            region: region_id(node.region),
            is_gateway: node.role() == api::NodeRole::Gateway,
        };
        let ids = |ids: Vec<u32>| ids.into_iter().map(NodeId).collect::<Vec<_>>();
        let partition = |partition: api::Partition| {
            let mut placed = ids(partition.replicas);
            placed.sort_by_key(|node| (node.0 != partition.preferred_leader, *node));
            PartitionInfo {
                id: PartitionId(partition.id),
                placed,
                voters: ids(partition.voters),
                learners: ids(partition.learners),
                leader: partition.leader.map(NodeId),
            }
        };
        let keyspace = |keyspace: api::Keyspace| KeyspaceInfo {
            name: keyspace.name,
            protocol: keyspace.protocol,
            guarantee: keyspace.guarantee,
            general: keyspace.general,
        };
        let map = map(&about);
        Self {
            map,
            cluster: about.cluster,
            epoch: about.epoch,
            region: region_id(about.region),
            nodes: about.nodes.into_iter().map(node).collect(),
            regions: about.regions.into_iter().map(region).collect(),
            partitions: about.partitions.into_iter().map(partition).collect(),
            keyspaces: about.keyspaces.into_iter().map(keyspace).collect(),
        }
    }
}

/// The placement that a gateway describes. Its regions are called by their numbers.
fn map(about: &api::DescribeResponse) -> Option<Cluster> {
    use api::partitioning::Kind;
    let partitioning = match about.partitioning.as_ref()?.kind.as_ref()? {
        Kind::Hash(_) => Partitioning::hash(about.partitions.iter().map(|p| PartitionId(p.id))),
        Kind::Ranges(ranges) => {
            let start = |start: &api::RangeStart| {
                (Key::from(start.key.clone()), PartitionId(start.partition))
            };
            Partitioning::Range { starts: ranges.starts.iter().map(start).collect() }
        }
    };
    let rtt = |a: u16, b: u16| {
        let row = about.regions.get(usize::from(a));
        let micros = row.and_then(|row| row.rtt_us.get(usize::from(b)));
        Duration::from_micros(micros.copied().unwrap_or_default())
    };
    let count = u16::try_from(about.regions.len()).ok()?;
    let topology = Topology::from_fn(count, rtt(0, 0), rtt);
    let nodes = about.nodes.iter().map(|node| Node {
        id: NodeId(node.id),
        region: RegionId(u16::try_from(node.region).unwrap_or(u16::MAX)),
        role: match node.role() {
            api::NodeRole::Gateway => Role::Gateway,
            api::NodeRole::Server | api::NodeRole::Unspecified => Role::Server,
        },
    });
    let partitions = about.partitions.iter().map(|partition| Partition {
        id: PartitionId(partition.id),
        replicas: partition.replicas.iter().copied().map(NodeId).collect(),
        preferred_leader: NodeId(partition.preferred_leader),
    });
    Cluster::new(topology, about.epoch, nodes, partitions, partitioning).ok()
}
