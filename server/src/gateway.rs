//! The interface of a protocol's client side: begin a transaction, read more in it, decide it, ask
//! for its outcome.
//!
//! A [`Gateway`] is a cheap handle on the task that owns the client machine. It bounds the
//! transactions in flight. A call whose future is dropped leaves no undecided transaction behind:
//! the transaction is aborted.
//!
//! In this module, a *caller* is whoever waits for the answer of such a call: in a server, the gRPC
//! service.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use orthodrome_core::Wire as _;
use orthodrome_core::lease::LeaseId;
use orthodrome_core::limits::bytes_of;
use orthodrome_core::machine::{Admin, Gauge, GroupView, MembershipOrder, Refusal};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::scan::Ask;
use orthodrome_core::txn::{Kind, Priority, Reads};
use orthodrome_core::{
    ClientId, Clock, Decision, Key, NodeId, Outcome, PartitionId, RegionId, Time, Txn, TxnId,
};
use tokio::sync::{Notify, oneshot};

use crate::node::ClockError;
use crate::own_txns::OwnClients;
use crate::scan::{ScanFailed, Scans, Subscription};
use crate::transport::LinkStatus;

/// How a transaction ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finished {
    /// Its outcome.
    pub outcome: Outcome,
    /// Its reads, if the gateway knows them: always for a committed read-only transaction or
    /// procedure.
    pub reads: Option<Reads>,
    /// The protocol's path: `fast`, `slow`, `read-only`, …
    pub path: &'static str,
}

/// The result of beginning a transaction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Begun {
    /// The reads of this round of an interactive or general transaction. It waits for
    /// [`Gateway::decide`], a general one possibly for [`Gateway::read`].
    Reads(Reads),
    /// The transaction has ended already: it was not interactive, or it aborted early.
    Finished(Finished),
}

/// Why a call failed. Except for [`GatewayError::Lost`], the call had no effect.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum GatewayError {
    /// Too many transactions are in flight. Retry later, with an increasing pause.
    #[error("{limit} transactions are pending at this node, which is its limit; try again later")]
    Overloaded {
        /// The configured bound.
        limit: usize,
    },
    /// The transactions in flight have too many bytes for one more. Retry later, with an increasing
    /// pause.
    #[error(
        "busy: with its {bytes} bytes, transactions in flight at this node would have more than the {limit} bytes \
         that limits.request_bytes_in_flight_max allows; try again after a pause, or at another gateway"
    )]
    OverloadedBytes {
        /// The bytes of the transaction.
        bytes: usize,
        /// The configured bound.
        limit: usize,
    },
    /// The node is shutting down. Retry at another node.
    #[error("this node is shutting down; use another one")]
    Stopping,
    /// The node has stopped serving because of an internal failure. Retry at another node.
    #[error("this node has stopped serving: {0}")]
    Failed(String),
    /// The transaction is not in flight here: it was never begun here, it ended, or the node
    /// restarted. [`Gateway::resolve`] finds out its outcome.
    #[error("transaction {0} is not pending at this node; ask for its outcome instead")]
    UnknownTransaction(TxnId),
    /// A transaction with this id is in flight here. An id is used once. A retry after a known
    /// abort increments the attempt; a retry without an answer asks for the outcome.
    #[error("transaction {0} was already submitted; ask for its outcome, or use the next attempt")]
    AlreadyBegun(TxnId),
    /// The id was used before at this gateway, or the attempt before it is not known here to have
    /// aborted. An id is used once.
    #[error(
        "the name {0} was used before, or its last attempt is not known here to have aborted; use a counter that \
         was never used"
    )]
    Used(TxnId),
    /// Another gateway registered the client, or this node before it started again. Register here, and
    /// use the new client id.
    #[error("client {0} is not registered at this gateway since it started; register here again")]
    Unregistered(ClientId),
    /// [`Gateway::decide`] or [`Gateway::read`] on a transaction that is not waiting for it.
    #[error("transaction {0} does not wait for its client: {1}")]
    NotUndecided(TxnId, &'static str),
    /// The node stopped during the call; the outcome is unknown.
    #[error("this node stopped before transaction {0} finished; its outcome is unknown")]
    Lost(TxnId),
}

impl GatewayError {
    /// True if the same call may succeed later or at another node.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Overloaded { .. }
            | Self::OverloadedBytes { .. }
            | Self::Stopping
            | Self::Failed(_) => true,
            Self::UnknownTransaction(_)
            | Self::AlreadyBegun(_)
            | Self::Used(_)
            | Self::Unregistered(_)
            | Self::NotUndecided(..)
            | Self::Lost(_) => false,
        }
    }
}

/// Why a node did not accept an operator's order.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum OrderError {
    /// The node's server side refused the order, so the order has no effect.
    #[error("{}", refused(.0))]
    Refused(Refusal),
    /// The node does not serve, so the order has no effect.
    #[error(transparent)]
    NotServing(GatewayError),
    /// The node stopped before it answered. It may have accepted the order.
    #[error("this node stopped before it could say whether it takes the order")]
    Lost,
}

/// A refusal as a sentence.
fn refused(refusal: &Refusal) -> String {
    match refusal {
        Refusal::NotLeader(Some(leader)) => {
            format!(
                "this node does not lead the partition; give the order to {leader}, which leads it as \
                 far as this node knows"
            )
        }
        Refusal::NotLeader(None) => "this node does not lead the partition and does not know who \
                                     does; try again, or give the order to another node"
            .into(),
        Refusal::NotNow(why) | Refusal::Invalid(why) | Refusal::Never(why) => why.clone(),
    }
}

/// Whether the node serves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Health {
    /// The node serves.
    Serving,
    /// The node finishes transactions in flight and accepts no new ones.
    Stopping,
    /// The node stopped because of an internal failure, described here.
    Failed(String),
}

/// A node's description of itself and of the keyspace that it serves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Description {
    /// The cluster's id.
    pub cluster: String,
    /// The protocol that runs the keyspace.
    pub protocol: &'static str,
    /// The guarantee of the protocol: `strict-serializable` or `serializable`.
    pub guarantee: &'static str,
    /// True if the protocol runs general transactions.
    pub general: bool,
    /// The node's server side.
    pub node: NodeId,
    /// The node's client side.
    pub gateway: NodeId,
    /// The region's name.
    pub region: String,
    /// The preferred leader of each partition.
    pub leaders: OrdMap<PartitionId, NodeId>,
    /// Whether the node serves.
    pub health: Health,
    /// Transactions in flight.
    pub in_flight: usize,
    /// Maximum number of transactions in flight.
    pub in_flight_max: usize,
}

/// What a transaction in flight waits for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Stage {
    /// For its reads. If it is dropped now, it aborts.
    Reads,
    /// For its client, who has the reads.
    Client,
    /// For its outcome: its client has asked for it. Until it is known, the transaction is in
    /// doubt.
    Outcome,
}

/// A transaction in flight.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pending {
    /// Its id.
    pub txn: TxnId,
    /// The name of its kind.
    pub kind: &'static str,
    /// Its priority.
    pub priority: Priority,
    /// What it waits for.
    pub stage: Stage,
    /// How long it has waited for that.
    pub waits: Duration,
    /// The time since it began here.
    pub age: Duration,
}

/// The transactions in flight at one gateway.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PendingTxns {
    /// Number of transactions that wait for their client.
    pub open: usize,
    /// How long the oldest of them has been in flight; zero if there is none.
    pub open_age_max: Duration,
    /// Number of transactions in doubt: their client has asked for the outcome, and there is none
    /// yet.
    pub in_doubt: usize,
    /// How long the one that has been in doubt for longest has been so; zero if there is none.
    pub in_doubt_age_max: Duration,
    /// The oldest transactions in flight, oldest first; at most [`PendingTxns::LISTED_MAX`].
    pub oldest: Vec<Pending>,
}

impl PendingTxns {
    /// The maximum length of the list.
    pub const LISTED_MAX: usize = 20;
}

/// Commands of the gateway to the task that owns the client machine.
#[derive(Debug)]
pub(crate) enum Command {
    Begin {
        txn: Txn,
        slot: Slot,
        reply: oneshot::Sender<Result<Begun, GatewayError>>,
    },
    Read {
        txn: TxnId,
        keys: Vec<Key>,
        reply: oneshot::Sender<Result<Begun, GatewayError>>,
    },
    Decide {
        txn: TxnId,
        decision: Decision,
        held: HeldBytes,
        reply: oneshot::Sender<Result<Finished, GatewayError>>,
    },
    Resolve {
        txn: Txn,
        reads: Reads,
        decision: Option<Decision>,
        slot: Slot,
        reply: oneshot::Sender<Result<Finished, GatewayError>>,
    },
    /// The caller of this transaction stopped waiting.
    Abandon(TxnId),
}

/// The running node behind a gateway.
pub(crate) trait Backend: Send + Sync {
    /// Sends a command to the client machine's task; false if that task has ended.
    fn submit(&self, command: Command) -> bool;
    /// Sends an order to the server machine's task, which answers whether it accepts the order.
    fn admin(&self, order: Admin) -> oneshot::Receiver<Result<(), Refusal>>;
    /// The server machine's knowledge of groups.
    fn groups(&self) -> oneshot::Receiver<Vec<GroupView>>;
    /// The node's current description.
    fn describe(&self) -> Description;
    /// The links to the other nodes.
    fn links(&self) -> Vec<LinkStatus>;
    /// The gauges of the client machine and of the server machine.
    fn gauges(&self) -> [oneshot::Receiver<Vec<Gauge>>; 2];
    /// The states of the orders to change members that the server machine was given, and the time
    /// of this report.
    fn orders(&self) -> oneshot::Receiver<(Time, Vec<MembershipOrder>)>;
    /// The transactions in flight at the client machine.
    fn pending(&self) -> oneshot::Receiver<PendingTxns>;
    /// Whether the node serves.
    fn health(&self) -> Health;
    /// A client id that no other call, process or restart ever returns.
    fn register(
        &self,
    ) -> std::pin::Pin<Box<dyn Future<Output = Result<ClientId, GatewayError>> + Send + '_>>;
    /// The region of the gateway.
    fn home(&self) -> RegionId;
    /// True if this gateway is the one to end the lease when it is due.
    fn ends(&self, lease: LeaseId) -> bool;
    /// The clock that timestamps come from.
    fn clock(&self) -> Result<Clock, ClockError>;
    /// True if this process registered the client.
    fn is_registered(&self, client: ClientId) -> bool;
    /// Begins a scan or a watch: it may ask servers from now on.
    fn subscribe(&self) -> Result<Subscription, ScanFailed>;
    /// Asks a server for names or changes, for a subscription with this number.
    fn ask(&self, number: u64, to: NodeId, ask: Ask);
    /// The subscription with this number has ended.
    fn unsubscribe(&self, number: u64);
}

/// Counts the transactions in flight.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    count: AtomicUsize,
    /// Bytes of their requests.
    bytes: AtomicUsize,
    freed: Notify,
}

/// Bounds on the transactions in flight at one gateway.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InFlightMax {
    pub(crate) count: usize,
    pub(crate) bytes: usize,
}

impl InFlight {
    /// Resolves when no transaction is in flight.
    pub(crate) async fn none(&self) {
        loop {
            let freed = self.freed.notified();
            if self.count.load(Ordering::Relaxed) == 0 {
                return;
            }
            freed.await;
        }
    }
}

/// A counted place among the transactions in flight; freed when dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    in_flight: Arc<InFlight>,
    /// The bytes of the request that began the transaction, and of later requests about it.
    bytes: Vec<HeldBytes>,
}

impl Slot {
    /// A place at a gateway with nothing else in flight.
    #[cfg(test)]
    pub(crate) fn only() -> Self {
        let in_flight = InFlight { count: AtomicUsize::new(1), ..InFlight::default() };
        Self { in_flight: Arc::new(in_flight), bytes: Vec::new() }
    }

    /// Counts the bytes of a later request until the transaction has ended.
    pub(crate) fn hold(&mut self, bytes: HeldBytes) {
        self.bytes.push(bytes);
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.bytes.clear();
        self.in_flight.count.fetch_sub(1, Ordering::Relaxed);
        self.in_flight.freed.notify_waiters();
    }
}

/// Bytes of one request, counted until this is dropped.
#[derive(Debug)]
pub(crate) struct HeldBytes {
    in_flight: Arc<InFlight>,
    bytes: usize,
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.in_flight.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A handle on the client side of one node. Clones are handles on the same node.
#[derive(Clone)]
pub struct Gateway {
    backend: Arc<dyn Backend>,
    in_flight: Arc<InFlight>,
    max: InFlightMax,
    scans: Arc<Scans>,
    own_clients: Arc<OwnClients>,
}

impl std::fmt::Debug for Gateway {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gateway").field("in_flight", &self.in_flight).finish_non_exhaustive()
    }
}

/// Notifies the machine's task when a caller stops waiting.
struct Abandoned<'a> {
    backend: &'a dyn Backend,
    txn: TxnId,
    armed: bool,
}

impl Drop for Abandoned<'_> {
    fn drop(&mut self) {
        if self.armed {
            self.backend.submit(Command::Abandon(self.txn));
        }
    }
}

impl Gateway {
    pub(crate) fn new(
        backend: Arc<dyn Backend>,
        in_flight: Arc<InFlight>,
        max: InFlightMax,
    ) -> Self {
        let (scans, own_clients) = (Arc::default(), Arc::default());
        Self { backend, in_flight, max, scans, own_clients }
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    pub(crate) fn scans(&self) -> &Scans {
        &self.scans
    }

    pub(crate) fn own_clients(&self) -> &OwnClients {
        &self.own_clients
    }

    /// Registers a new client incarnation: an id that no other client of the cluster ever has.
    ///
    /// # Errors
    /// The node is stopping or has failed.
    pub async fn register(&self) -> Result<ClientId, GatewayError> {
        self.serving()?;
        self.backend.register().await
    }

    /// Begins a transaction. If the returned future is dropped before it is ready, the transaction
    /// is aborted unless it has been decided.
    ///
    /// # Errors
    /// See [`GatewayError`]; the transaction was not begun, except for [`GatewayError::Lost`].
    pub async fn begin(&self, txn: Txn) -> Result<Begun, GatewayError> {
        self.serving()?;
        if !self.backend.is_registered(txn.id.client) {
            return Err(GatewayError::Unregistered(txn.id.client));
        }
        let slot = self.slot(txn.size())?;
        let (id, txn) = (txn.id.name(), txn.with_content());
        let (reply, answer) = oneshot::channel();
        self.call(id, Command::Begin { txn, slot, reply }, answer).await
    }

    /// Reads more in a general transaction that [`Gateway::begin`] began. If the returned future is
    /// dropped before it is ready, the transaction is aborted.
    ///
    /// # Errors
    /// See [`GatewayError`].
    pub async fn read(&self, txn: TxnId, keys: Vec<Key>) -> Result<Begun, GatewayError> {
        // As with a decision: a stopping node still finishes open transactions.
        if let Health::Failed(why) = self.backend.health() {
            return Err(GatewayError::Failed(why));
        }
        let (reply, answer) = oneshot::channel();
        self.call(txn, Command::Read { txn, keys, reply }, answer).await
    }

    /// Decides an interactive or general transaction whose reads [`Gateway::begin`] returned.
    ///
    /// # Errors
    /// See [`GatewayError`].
    pub async fn decide(&self, txn: TxnId, decision: Decision) -> Result<Finished, GatewayError> {
        // A stopping node still finishes open transactions.
        if let Health::Failed(why) = self.backend.health() {
            return Err(GatewayError::Failed(why));
        }
        // Bytes of a decision are not refused, because the end of a transaction frees all its
        // bytes.
        let held = self.hold(decision_bytes(&decision));
        let (reply, answer) = oneshot::channel();
        self.call(txn, Command::Decide { txn, decision, held, reply }, answer).await
    }

    /// Finds out the outcome of a transaction begun here or elsewhere, and ends it if it has none
    /// yet. `decision` is what the caller had asked for, based on `reads`.
    ///
    /// # Errors
    /// See [`GatewayError`].
    pub async fn resolve(
        &self,
        txn: Txn,
        reads: Reads,
        decision: Option<Decision>,
    ) -> Result<Finished, GatewayError> {
        self.serving()?;
        let slot = self.slot(txn.size() + decision.as_ref().map_or(0, decision_bytes))?;
        let (id, txn) = (txn.id.name(), txn.with_content());
        let (reply, answer) = oneshot::channel();
        self.call(id, Command::Resolve { txn, reads, decision, slot, reply }, answer).await
    }

    /// The node's description of itself now.
    #[must_use]
    pub fn describe(&self) -> Description {
        let in_flight = self.in_flight.count.load(Ordering::Relaxed);
        Description { in_flight, in_flight_max: self.max.count, ..self.backend.describe() }
    }

    /// The links to the other nodes of the cluster.
    #[must_use]
    pub fn links(&self) -> Vec<LinkStatus> {
        self.backend.links()
    }

    /// The gauges of the protocol's two sides, for operators. Gauges of a side that has ended, or
    /// does not answer within a second, are missing, so that the status of an overloaded node is
    /// available; `sides_without_an_answer` counts these sides.
    pub async fn gauges(&self) -> Vec<Gauge> {
        let most = Duration::from_secs(1);
        let [client, server] = self.backend.gauges().map(|side| tokio::time::timeout(most, side));
        let (client, server) = tokio::join!(client, server);
        let sides = [client, server].map(|side| side.ok().and_then(Result::ok));
        let silent = sides.iter().filter(|side| side.is_none()).count();
        let silent = Gauge {
            name: "sides_without_an_answer",
            node: self.backend.describe().node,
            value: i64::try_from(silent).unwrap_or(i64::MAX),
        };
        sides.into_iter().flatten().flatten().chain([silent]).collect()
    }

    /// The transactions in flight; none if the client side does not answer within a second.
    pub async fn pending(&self) -> Option<PendingTxns> {
        let answer = tokio::time::timeout(Duration::from_secs(1), self.backend.pending()).await;
        answer.ok().and_then(Result::ok)
    }

    /// Orders to change members that were given to the node's server side, with their age; empty if
    /// it does not answer within a second.
    pub async fn orders(&self) -> Vec<(MembershipOrder, Duration)> {
        let answer = tokio::time::timeout(Duration::from_secs(1), self.backend.orders()).await;
        let Ok(Ok((now, orders))) = answer else { return Vec::new() };
        let aged = |order: MembershipOrder| {
            let age = now.since(order.given);
            (order, age)
        };
        orders.into_iter().map(aged).collect()
    }

    /// Gives an operator's order to the node's server side. If it accepts the order, it executes it
    /// in the background; [`Gateway::orders`] reports the state of an order to change members.
    ///
    /// # Errors
    /// The order has no effect, except for [`OrderError::Lost`].
    pub async fn admin(&self, order: Admin) -> Result<(), OrderError> {
        self.serving().map_err(OrderError::NotServing)?;
        match self.backend.admin(order).await {
            Ok(answer) => answer.map_err(OrderError::Refused),
            Err(_) => Err(OrderError::Lost),
        }
    }

    /// The server side's knowledge of the members and leaders of partitions. A partition that is
    /// missing in the answer is as placed, as far as the node knows. If the server side does not
    /// answer within a second, all are missing.
    pub async fn groups(&self) -> Vec<GroupView> {
        let answer = tokio::time::timeout(Duration::from_secs(1), self.backend.groups()).await;
        answer.ok().and_then(Result::ok).unwrap_or_default()
    }

    fn serving(&self) -> Result<(), GatewayError> {
        match self.backend.health() {
            Health::Serving => Ok(()),
            Health::Stopping => Err(GatewayError::Stopping),
            Health::Failed(why) => Err(GatewayError::Failed(why)),
        }
    }

    /// A place for a transaction whose request has this number of bytes.
    fn slot(&self, bytes: usize) -> Result<Slot, GatewayError> {
        let limit = self.max.bytes;
        let fits = |held: usize| Some(held.saturating_add(bytes)).filter(|all| *all <= limit);
        let relaxed = Ordering::Relaxed;
        let taken = self.in_flight.bytes.try_update(relaxed, relaxed, fits);
        taken.map_err(|_| GatewayError::OverloadedBytes { bytes, limit })?;
        let held = HeldBytes { in_flight: self.in_flight.clone(), bytes };
        let limit = self.max.count;
        let fits = |held: usize| (held < limit).then_some(held + 1);
        let taken = self.in_flight.count.try_update(relaxed, relaxed, fits);
        taken.map_err(|_| GatewayError::Overloaded { limit })?;
        Ok(Slot { in_flight: self.in_flight.clone(), bytes: vec![held] })
    }

    /// Counts the bytes of a request about a transaction that is in flight.
    fn hold(&self, bytes: usize) -> HeldBytes {
        self.in_flight.bytes.fetch_add(bytes, Ordering::Relaxed);
        HeldBytes { in_flight: self.in_flight.clone(), bytes }
    }

    async fn call<T>(
        &self,
        txn: TxnId,
        command: Command,
        answer: oneshot::Receiver<Result<T, GatewayError>>,
    ) -> Result<T, GatewayError> {
        if !self.backend.submit(command) {
            return Err(match self.backend.health() {
                Health::Failed(why) => GatewayError::Failed(why),
                Health::Serving | Health::Stopping => GatewayError::Stopping,
            });
        }
        let mut guard = Abandoned { backend: &*self.backend, txn, armed: true };
        let answer = answer.await;
        guard.armed = false;
        answer.unwrap_or(Err(GatewayError::Lost(txn)))
    }
}

/// Bytes of the keys and values that a decision writes.
fn decision_bytes(decision: &Decision) -> usize {
    match decision {
        Decision::Commit(writes) => bytes_of(writes),
        Decision::Abort => 0,
    }
}

/// The name of a kind of transactions, in metrics and for operators.
pub(crate) fn name_of(kind: &Kind) -> &'static str {
    match kind {
        Kind::Interactive => "interactive",
        Kind::General => "general",
        Kind::Procedure(_) => "procedure",
        Kind::ReadOnly => "read-only",
        Kind::StaleReadOnly => "stale-read-only",
    }
}

/// True if the transaction waits for its caller after a round.
pub(crate) fn is_interactive(txn: &Txn) -> bool {
    match txn.kind {
        Kind::Interactive | Kind::General => true,
        Kind::Procedure(_) | Kind::ReadOnly | Kind::StaleReadOnly => false,
    }
}
