//! Metrics of transactions, and the page for Prometheus.
//!
//! Names and units follow the conventions of Prometheus: base units, `_total` for counters. Every
//! metric has the labels `protocol`, `region` and `node`.

use std::borrow::Cow;
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use orthodrome_core::machine::{Gauge as Quantity, GroupView};
use orthodrome_core::txn::Priority;
use orthodrome_core::{NodeId, Outcome, Txn, TxnId};
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tokio::time::Instant;

use super::live::Live;
use crate::gateway::{Description, PendingTxns, name_of};
use crate::transport::LinkStatus;

/// Upper bounds of the buckets of latencies, in seconds: from a commit on one machine to one that
/// waited for several round trips around the world.
const SECONDS: [f64; 16] =
    [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0];

/// The kind of a request for the outcome of a transaction.
const RESOLVE: &str = "resolve";

/// The labels and the times of a transaction in progress.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    pub(super) txn: TxnId,
    pub(super) kind: &'static str,
    pub(super) priority: &'static str,
    pub(super) began: Instant,
    /// When the node answered the last round of reads; none if there was none.
    pub(super) reads_answered: Option<Instant>,
    /// When the client decided; none if it does not decide.
    pub(super) decided: Option<Instant>,
}

impl Timing {
    /// For a transaction that arrives now.
    pub(super) fn start(txn: &Txn) -> Self {
        Self { kind: name_of(&txn.kind), ..Self::resolve(txn) }
    }

    /// For a request for the outcome of a transaction.
    pub(super) fn resolve(txn: &Txn) -> Self {
        let priority = if txn.priority > Priority::LOW { "high" } else { "low" };
        let began = Instant::now();
        let (reads_answered, decided) = (None, None);
        Self { txn: txn.id, kind: RESOLVE, priority, began, reads_answered, decided }
    }

    /// True if the priority is above the lowest.
    pub(super) fn is_high(&self) -> bool {
        self.priority == "high"
    }
}

/// The rounds of a transaction with several rounds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// The first reads.
    Begin,
    /// Further reads of a general transaction.
    Read,
    /// From the decision of the client to the outcome.
    Commit,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Ended {
    kind: &'static str,
    priority: &'static str,
    outcome: &'static str,
    /// The reason for the abort; empty if it did not abort.
    reason: String,
    /// The protocol's path.
    path: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Latency {
    kind: &'static str,
    priority: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Round {
    phase: &'static str,
    priority: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RedisCommand {
    command: &'static str,
    /// `ok` or `error`.
    result: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct About {
    name: &'static str,
    about: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Partition {
    partition: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Behind {
    partition: String,
    peer: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Peer {
    peer: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Build {
    version: &'static str,
    cluster: String,
    guarantee: &'static str,
}

/// A histogram of latencies.
type Latencies<L> = Family<L, Histogram, fn() -> Histogram>;

fn latencies() -> Histogram {
    Histogram::new(SECONDS)
}

/// Measurements since the process started.
pub(super) struct Metrics {
    pub(super) committed: Counter,
    pub(super) aborted: Counter,
    pub(super) unknown: Counter,
    /// Number of transactions that aborted because their lease expired.
    pub(super) leases_expired: Counter,
    /// Number of leases of keys that were granted here.
    pub(super) leases_granted: Counter,
    /// Number of leases of keys that this gateway has ended.
    pub(super) leases_ended: Counter,
    /// Number of keys that it has deleted with them.
    pub(super) lease_keys_deleted: Counter,
    /// Number of high-priority transactions that ran with low priority, because a quota was used
    /// up.
    pub(super) demoted: Counter,
    ended: Family<Ended, Counter>,
    latency: Latencies<Latency>,
    rounds: Latencies<Round>,
    redis_commands: Family<RedisCommand, Counter>,
    /// Connections of the Redis protocol.
    pub(super) redis_connections: Gauge,
    /// Watches of clients of the gRPC API.
    pub(super) watches: Gauge,
    /// What the console shows.
    pub(super) live: Live,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Default for Metrics {
    fn default() -> Self {
        let (latency, rounds) = (
            Latencies::new_with_constructor(latencies as fn() -> Histogram),
            Latencies::new_with_constructor(latencies as fn() -> Histogram),
        );
        Self {
            committed: Counter::default(),
            aborted: Counter::default(),
            unknown: Counter::default(),
            leases_expired: Counter::default(),
            leases_granted: Counter::default(),
            leases_ended: Counter::default(),
            lease_keys_deleted: Counter::default(),
            demoted: Counter::default(),
            ended: Family::default(),
            latency,
            rounds,
            redis_commands: Family::default(),
            redis_connections: Gauge::default(),
            watches: Gauge::default(),
            live: Live::default(),
        }
    }
}

/// The other contents of the page: the current state.
pub(super) struct Now<'a> {
    pub(super) about: &'a Description,
    /// Requests in flight, and their bound.
    pub(super) requests: [usize; 2],
    /// Transactions that wait for their clients, and their bound.
    pub(super) open: [usize; 2],
    /// Requests refused because of overload.
    pub(super) refused: u64,
    pub(super) uptime: Duration,
    pub(super) quantities: &'a [Quantity],
    pub(super) groups: &'a [GroupView],
    pub(super) links: &'a [LinkStatus],
    /// The transactions in flight; none if the gateway does not answer.
    pub(super) pending: Option<&'a PendingTxns>,
}

impl Metrics {
    /// Counts a transaction whose client is about to receive this outcome.
    pub(super) fn end(&self, timing: Timing, path: &'static str, outcome: Outcome) {
        let Timing { kind, priority, began, .. } = timing;
        if kind != RESOLVE {
            self.live.end(&timing, path, outcome);
        }
        let (total, outcome, reason) = match outcome {
            Outcome::Committed(_) => (&self.committed, "committed", String::new()),
            Outcome::Aborted(reason) => (&self.aborted, "aborted", reason.to_string()),
            Outcome::Unknown => (&self.unknown, "unknown", String::new()),
        };
        total.inc();
        self.ended.get_or_create(&Ended { kind, priority, outcome, reason, path }).inc();
        let seconds = began.elapsed().as_secs_f64();
        self.latency.get_or_create(&Latency { kind, priority, outcome }).observe(seconds);
    }

    /// Measures one round of a transaction, which began at `since`.
    pub(super) fn round(&self, phase: Phase, timing: Timing, since: Instant) {
        let phase = match phase {
            Phase::Begin => "begin",
            Phase::Read => "read",
            Phase::Commit => "commit",
        };
        let round = self.rounds.get_or_create_owned(&Round { phase, priority: timing.priority });
        round.observe(since.elapsed().as_secs_f64());
    }

    /// Records a scan.
    pub(super) fn scanned(&self, took: Duration, priority: Priority, is_ok: bool) {
        let priority = if priority > Priority::LOW { "high" } else { "low" };
        let outcome = if is_ok { "committed" } else { "error" };
        let labels = Latency { kind: "scan", priority, outcome };
        self.latency.get_or_create(&labels).observe(took.as_secs_f64());
    }

    /// Counts a command of the Redis protocol.
    pub(super) fn redis_command(&self, command: &'static str, is_error: bool) {
        let result = if is_error { "error" } else { "ok" };
        self.redis_commands.get_or_create(&RedisCommand { command, result }).inc();
    }

    /// The page for Prometheus.
    ///
    /// # Errors
    /// Formatting fails, which writing to a string never does.
    pub(super) fn page(&self, now: &Now<'_>) -> Result<String, fmt::Error> {
        let about = now.about;
        let label = |name: &'static str, value: String| (Cow::Borrowed(name), Cow::Owned(value));
        let labels = [
            label("protocol", about.protocol.to_owned()),
            label("region", about.region.clone()),
            label("node", about.node.to_string()),
        ];
        let mut registry = Registry::with_prefix_and_labels("orthodrome", labels.into_iter());
        self.register(&mut registry);
        register_now(&mut registry, now);
        let mut page = String::new();
        text::encode(&mut page, &registry)?;
        Ok(page)
    }

    fn register(&self, registry: &mut Registry) {
        registry.register(
            "transactions",
            "Transactions whose outcome a client received, by kind, priority, outcome, reason of the abort and path through the protocol",
            self.ended.clone(),
        );
        registry.register(
            "transaction_seconds",
            "Time from the first request of a transaction to its outcome, with the time of its client",
            self.latency.clone(),
        );
        registry.register(
            "round_seconds",
            "Time that the node took for one round of an interactive or general transaction: begin, read or commit",
            self.rounds.clone(),
        );
        registry.register(
            "leases_expired",
            "Transactions aborted because their client let the lease run out, or was idle while the node stopped",
            self.leases_expired.clone(),
        );
        registry.register(
            "leases_granted",
            "Leases of keys that this gateway has granted",
            self.leases_granted.clone(),
        );
        registry.register(
            "leases_ended",
            "Leases of keys that this gateway has ended, because nobody renewed them or they were revoked",
            self.leases_ended.clone(),
        );
        registry.register(
            "lease_keys_deleted",
            "Keys that this gateway has deleted because their lease had ended",
            self.lease_keys_deleted.clone(),
        );
        registry.register(
            "priority_demoted",
            "Transactions of high priority that ran with low, because the quota of their principal was used up",
            self.demoted.clone(),
        );
        registry.register(
            "redis_commands",
            "Commands of the Redis protocol, by name and by whether the answer was an error",
            self.redis_commands.clone(),
        );
        registry.register(
            "redis_connections",
            "Connections of the Redis protocol",
            self.redis_connections.clone(),
        );
        registry.register("watches", "Watches of clients of the gRPC API", self.watches.clone());
    }
}

fn register_now(registry: &mut Registry, now: &Now<'_>) {
    let gauge = |registry: &mut Registry, name: &str, help: &str, value: usize| {
        let gauge: Gauge = Gauge::default();
        gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        registry.register(name, help, gauge);
    };
    let ([requests, requests_max], [open, open_max]) = (now.requests, now.open);
    gauge(registry, "requests_in_flight", "Requests being worked on", requests);
    gauge(registry, "requests_in_flight_limit", "Most requests at once", requests_max);
    gauge(
        registry,
        "transactions_in_flight",
        "Transactions without an outcome yet",
        now.about.in_flight,
    );
    gauge(
        registry,
        "transactions_in_flight_limit",
        "Most transactions without an outcome",
        now.about.in_flight_max,
    );
    gauge(registry, "transactions_open", "Transactions that wait for their client", open);
    gauge(
        registry,
        "transactions_open_limit",
        "Most transactions that wait for their client",
        open_max,
    );
    register_pending(registry, now.pending);
    let refused: Counter = Counter::default();
    refused.inc_by(now.refused);
    registry.register("requests_refused", "Requests refused because of overload", refused);
    let uptime = Gauge::<f64, AtomicU64>::default();
    uptime.set(now.uptime.as_secs_f64());
    registry.register("uptime_seconds", "Time since the node started to serve clients", uptime);
    let build = Family::<Build, Gauge>::default();
    let Description { cluster, guarantee, .. } = now.about;
    let version = env!("CARGO_PKG_VERSION");
    build.get_or_create(&Build { version, cluster: cluster.clone(), guarantee }).set(1);
    registry.register("build_info", "Always 1; the labels say what runs", build);

    let quantities = Family::<About, Gauge>::default();
    for Quantity { name, node, value } in now.quantities {
        quantities.get_or_create(&About { name, about: node.to_string() }).set(*value);
    }
    registry.register(
        "protocol",
        "Quantities of the protocol; `name` ends with the unit, and `about` is the node concerned",
        quantities,
    );
    register_groups(registry, now.about.node, now.groups);
    register_links(registry, now.links);
}

/// These metrics are missing if the gateway does not answer, so that nobody takes it for idle.
fn register_pending(registry: &mut Registry, pending: Option<&PendingTxns>) {
    let Some(pending) = pending else { return };
    let in_doubt: Gauge = Gauge::default();
    in_doubt.set(i64::try_from(pending.in_doubt).unwrap_or(i64::MAX));
    registry.register(
        "transactions_in_doubt",
        "Transactions whose client has asked for the outcome, and that have none yet",
        in_doubt,
    );
    let age = |registry: &mut Registry, name: &str, help: &str, age: Duration| {
        let gauge = Gauge::<f64, AtomicU64>::default();
        gauge.set(age.as_secs_f64());
        registry.register(name, help, gauge);
    };
    age(
        registry,
        "transactions_in_doubt_age_seconds",
        "How long the transaction that has been in doubt for longest has been so; 0 if there is none",
        pending.in_doubt_age_max,
    );
    age(
        registry,
        "transactions_open_age_seconds",
        "Time since the oldest transaction that waits for its client began; 0 if there is none",
        pending.open_age_max,
    );
}

fn register_groups(registry: &mut Registry, node: NodeId, groups: &[GroupView]) {
    let behind = Family::<Behind, Gauge>::default();
    let (leads, voters, known) = (
        Family::<Partition, Gauge>::default(),
        Family::<Partition, Gauge>::default(),
        Family::<Partition, Gauge>::default(),
    );
    for group in groups {
        let partition = Partition { partition: group.partition.to_string() };
        if group.has_leaders {
            leads.get_or_create(&partition).set(i64::from(group.leader == Some(node)));
            known.get_or_create(&partition).set(i64::from(group.leader.is_some()));
        }
        let many = i64::try_from(group.voters.len()).unwrap_or(i64::MAX);
        voters.get_or_create(&partition).set(many);
        for (peer, entries) in &group.behind {
            let labels = Behind { peer: peer.to_string(), partition: partition.partition.clone() };
            let entries = i64::try_from(*entries).unwrap_or(i64::MAX);
            behind.get_or_create(&labels).set(entries);
        }
    }
    registry.register("partition_leads", "1 if this node leads the partition", leads);
    registry.register("partition_leader_known", "1 if this node knows a leader", known);
    registry.register("partition_voters", "Members of the partition that vote", voters);
    registry.register(
        "partition_behind_entries",
        "Entries of the log that are not durable at the peer yet, as the leader knows",
        behind,
    );
}

fn register_links(registry: &mut Registry, links: &[LinkStatus]) {
    let (connected, queued) = (Family::<Peer, Gauge>::default(), Family::<Peer, Gauge>::default());
    let round_trip = Family::<Peer, Gauge<f64, AtomicU64>>::default();
    let (sent, received, lost) = (
        Family::<Peer, Counter>::default(),
        Family::<Peer, Counter>::default(),
        Family::<Peer, Counter>::default(),
    );
    for link in links {
        let peer = Peer { peer: link.peer.to_string() };
        connected.get_or_create(&peer).set(i64::from(link.is_connected));
        queued.get_or_create(&peer).set(i64::try_from(link.queued_bytes).unwrap_or(i64::MAX));
        // Zero until the first ping is answered. A link that is down has no round trip.
        if link.is_connected && link.rtt_us > 0 {
            let seconds = Duration::from_micros(link.rtt_us).as_secs_f64();
            round_trip.get_or_create(&peer).set(seconds);
        }
        sent.get_or_create(&peer).inc_by(link.sent_bytes);
        received.get_or_create(&peer).inc_by(link.received_bytes);
        lost.get_or_create(&peer).inc_by(link.lost);
    }
    registry.register("peer_connected", "1 if this node can send to the peer now", connected);
    registry.register(
        "peer_round_trip_seconds",
        "Round-trip time of the last ping to the peer, without delays that the node emulates",
        round_trip,
    );
    registry.register("peer_queue_bytes", "Bytes that wait to be sent to the peer", queued);
    registry.register("peer_sent_bytes", "Bytes of messages sent to the peer", sent);
    registry.register("peer_received_bytes", "Bytes of messages received from the peer", received);
    registry.register(
        "peer_messages_lost",
        "Messages to the peer that were dropped: the queue was full, or there was no connection",
        lost,
    );
}
