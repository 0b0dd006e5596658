//! A cluster, its callers and its faults in virtual time: one seed, one run.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::{self, Debug};
use std::sync::Arc;

use orthodrome_core::cluster::{Cluster, Role};
use orthodrome_core::digest::Digest;
use orthodrome_core::host::Host;
use orthodrome_core::id::{NodeId, TxnId};
use orthodrome_core::limits::Limits;
use orthodrome_core::machine::{Effect, Input, Machine, Message, Protocol, Setup};
use orthodrome_core::rng::Rng;
use orthodrome_core::time::{Duration, Time};
use orthodrome_core::trace::{Event as TraceEvent, Line};
use orthodrome_core::txn::{Key, Read, Reads};
use orthodrome_eval::metrics::{Run, RunResult, Summary};
use orthodrome_eval::workload::Workload;

use crate::clock::{ClockModel, NodeClock};
use crate::cpu::{Cpu, CpuModel, Tally, sooner};
use crate::disk::{Disk, DiskFailure, DiskModel};
use crate::fault::{Plan, Schedule, ScheduleError};
use crate::load::{HistorySink, Load, LoadModel};
use crate::network::{Fate, Network, NetworkModel, Released};
use crate::oracle::Oracle;
use crate::orders::OrderReport;
use crate::promise::Beyond;
use crate::queue::Queue;
use crate::traffic::Traffic;
use crate::watch::{self, Copies, Unrest, Watch};

/// Everything about a run that is not the cluster, the protocol or the workload.
#[derive(Clone, Debug)]
pub struct Options {
    /// Decides every draw.
    pub seed: u64,
    /// The network.
    pub network: NetworkModel,
    /// Node clocks.
    pub clock: ClockModel,
    /// Disks.
    pub disk: DiskModel,
    /// CPU time; none: infinitely fast.
    pub cpu: Option<CpuModel>,
    /// How large a record and a message may be; a run in which a machine makes a larger one has failed.
    pub limits: Limits,
    /// Callers.
    pub load: LoadModel,
    /// How long the run goes on before it is measured.
    pub warmup: Duration,
    /// How long callers begin transactions; the measured part ends then.
    pub duration: Duration,
    /// How long what is under way then has to end, before it counts as stuck.
    pub drain: Duration,
    /// Call a machine's `assert_invariants` after its input at every so-many-th event; 1: after every
    /// input, 0: never.
    pub invariants_every: u64,
    /// Remember everything that callers are told and machines claim, and hold the protocol to it.
    pub check_outcomes: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            seed: 1,
            network: NetworkModel::default(),
            clock: ClockModel::default(),
            disk: DiskModel::default(),
            cpu: Some(CpuModel::default()),
            limits: Limits::SERVER,
            load: LoadModel::default(),
            warmup: Duration::from_secs(10),
            duration: Duration::from_secs(60),
            drain: Duration::from_secs(60),
            invariants_every: 0,
            check_outcomes: false,
        }
    }
}

/// What went wrong in a run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum FailureKind {
    /// A machine's assertion failed.
    Panic,
    /// A caller was told something that is not so.
    Promise,
    /// Something that must end did not.
    Stuck,
    /// Two machines contradict each other, or what a caller was told.
    Claim,
    /// A machine made a record or a message that no host takes.
    Limit,
    /// The history is not what the protocol guarantees.
    History,
    /// The same seed gave two different runs.
    Twins,
}

impl fmt::Display for FailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Panic => "assertion failed",
            Self::Promise => "safety violated",
            Self::Stuck => "liveness failed",
            Self::Claim => "contradictory claims",
            Self::Limit => "size limit exceeded",
            Self::History => "history check failed",
            Self::Twins => "not deterministic",
        })
    }
}

/// A run in which a check failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{kind} at {at}: {detail}")]
pub struct Failure {
    /// When it was found.
    pub at: Time,
    /// What kind of failure it is.
    pub kind: FailureKind,
    /// What exactly.
    pub detail: String,
}

/// Where trace lines go.
pub type TraceSink = Box<dyn FnMut(&Line)>;

#[derive(Debug)]
pub(crate) enum Process<P: Protocol> {
    Server(Box<Host<P, P::Server>>),
    Gateway(Box<Host<P, P::Client>>),
    Down,
}

/// Calls a method of whichever host runs; `$down` if none does.
macro_rules! on_host {
    ($process:expr, $host:ident => $call:expr, $down:expr) => {
        match $process {
            Process::Server($host) => $call,
            Process::Gateway($host) => $call,
            Process::Down => $down,
        }
    };
}

#[derive(Debug)]
pub(crate) struct Node<P: Protocol> {
    pub(crate) id: NodeId,
    pub(crate) role: Role,
    pub(crate) process: Process<P>,
    pub(crate) disk: Disk<P>,
    pub(crate) clock: NodeClock,
    pub(crate) cpu: Cpu,
    /// What its machine's workers did.
    work: Arc<Tally>,
    /// The wake-up that counts; others are outdated.
    wake: Option<Time>,
    /// How many faults keep the node down.
    pub(crate) held_down: u32,
    /// How many faults keep the node paused.
    pub(crate) paused: u32,
    /// What arrived while the node was paused.
    backlog: VecDeque<Event<P>>,
    /// A fault of the disk stopped the node and is not repaired yet.
    pub(crate) disk_stopped: bool,
}

/// A message on its way.
#[derive(Debug)]
pub(crate) struct InFlight<P: Protocol> {
    pub(crate) from: u32,
    pub(crate) to: u32,
    /// Which life of the sender and of the receiver the connection belongs to.
    lives: (u32, u32),
    pub(crate) sent: Time,
    /// Size on the wire.
    bytes: u32,
    hops: u16,
    pub(crate) msg: P::Msg,
}

/// What step-by-step control holds back.
pub(crate) struct Manual<P: Protocol> {
    /// Messages that were sent and not delivered, numbered from 1 in the order of sending.
    pub(crate) held: Vec<(u32, InFlight<P>)>,
    next: u32,
    /// Told of every message that is sent.
    echo: EchoSink<P>,
}

type EchoSink<P> = Box<dyn FnMut(u32, &InFlight<P>)>;

impl<P: Protocol> Manual<P> {
    fn hold(&mut self, flight: InFlight<P>) {
        self.next += 1;
        (self.echo)(self.next, &flight);
        self.held.push((self.next, flight));
    }
}

#[derive(Debug)]
enum Event<P: Protocol> {
    /// A message arrives; `is_ready` once it has had its CPU time.
    Arrive { flight: InFlight<P>, is_ready: bool },
    /// A caller's input has had its CPU time.
    Input { node: u32, life: u32, input: Box<Input<P>>, hops: u16 },
    /// A node's timers are due.
    Wake { node: u32 },
    /// A flush is done.
    Flushed { node: u32, life: u32 },
    /// An open-loop arrival.
    Arrival,
    /// A client acts.
    Client { client: u32, serial: u32 },
    /// An entry of the fault schedule begins or ends.
    Fault { entry: u32, is_heal: bool },
}

/// Everything but the nodes.
pub(crate) struct World<P: Protocol> {
    pub(crate) now: Time,
    queue: Queue<Event<P>>,
    pub(crate) network: Network<InFlight<P>>,
    pub(crate) load: Load,
    /// How often each node has crashed.
    lives: Vec<u32>,
    pub(crate) up: Vec<bool>,
    ids: Vec<NodeId>,
    /// Dense number of each node id.
    dense: Vec<u32>,
    traffic: Traffic,
    notes: BTreeMap<P::Note, u64>,
    trace: Option<TraceSink>,
    hash: Digest,
    pub(crate) disk_rng: Rng,
    /// Step-by-step control: messages are held, flushes and timers wait to be asked for.
    pub(crate) manual: Option<Manual<P>>,
    events: u64,
    /// See [`Simulation::limit_events`].
    events_max: u64,
    pub(crate) failure: Option<Failure>,
    /// Claims, if they are held against each other.
    watch: Option<Watch>,
    /// A disk lost what it had reported durable: the run is over.
    pub(crate) beyond: Option<Beyond>,
    limits: Limits,
}

/// A cluster of `P`, its callers and its faults.
pub struct Simulation<P: Protocol> {
    pub(crate) cluster: Arc<Cluster>,
    config: Arc<P::Config>,
    options: Options,
    pub(crate) nodes: Vec<Node<P>>,
    pub(crate) world: World<P>,
    pub(crate) plan: Plan,
    /// How often each kind of fault was injected.
    pub(crate) injected: BTreeMap<&'static str, u64>,
    /// The database was read at the end, and the workload found nothing wrong.
    is_audited: bool,
}

/// What a run amounted to.
#[derive(Clone, Debug)]
pub struct Report {
    /// The published figures. `wall` is the caller's to fill in: this crate has no clock.
    pub result: RunResult,
    /// Latencies by the region that transactions were begun in.
    pub regions: BTreeMap<String, Summary>,
    /// The distribution function of all latencies, as [`orthodrome_eval::metrics::OfKind::cdf_ms`].
    pub cdf_ms: Vec<f64>,
    /// Messages and bytes of the measured part.
    pub traffic: Traffic,
    /// How often each of the protocol's rare events happened, by its `Debug` name.
    pub notes: BTreeMap<String, u64>,
    /// How often each kind of fault was injected.
    pub injected: BTreeMap<&'static str, u64>,
    /// What has become of the orders to change members that the schedule gave.
    pub orders: Vec<OrderReport>,
    /// A hash of everything that happened.
    pub trace_hash: u64,
    /// Transactions that had not ended when the run did.
    pub outstanding: u32,
    /// Core time of all nodes, of the whole run, by the CPU-time model.
    pub cpu: Duration,
    /// Whether the workload's own audit of the database held at the end; none if it has no audit. False if it was not made,
    /// because not everything had ended, or found something wrong.
    pub audited: Option<bool>,
    /// The run ended early because a disk lost writes that it had reported durable.
    pub beyond: Option<Beyond>,
}

/// A simulation, whatever its protocol.
pub trait Simulated {
    /// See [`Simulation::keep_history`].
    fn keep_history(&mut self, sink: HistorySink);
    /// See [`Simulation::keep_trace`].
    fn keep_trace(&mut self, sink: TraceSink);
    /// The time.
    fn now(&self) -> Time;
    /// See [`Simulation::run`].
    ///
    /// # Errors
    /// The first promise that was broken.
    fn run(&mut self) -> Result<Report, Failure>;
    /// See [`Simulation::report`].
    fn report(&mut self) -> Report;
}

impl<P: Protocol> Simulated for Simulation<P> {
    fn keep_history(&mut self, sink: HistorySink) {
        self.keep_history(sink);
    }

    fn keep_trace(&mut self, sink: TraceSink) {
        self.keep_trace(sink);
    }

    fn now(&self) -> Time {
        self.now()
    }

    fn run(&mut self) -> Result<Report, Failure> {
        self.run()
    }

    fn report(&mut self) -> Report {
        self.report()
    }
}

/// More events than any run has at one instant: past this, time has stopped.
const EVENTS_AT_ONCE: u64 = 2_000_000;

impl<P: Protocol> Simulation<P> {
    /// Starts every node at time zero. Callers begin with [`Simulation::run`].
    ///
    /// # Errors
    /// What in the schedule does not fit the cluster.
    pub fn new(
        cluster: Cluster,
        config: P::Config,
        workload: Box<dyn Workload>,
        schedule: &Schedule,
        options: Options,
    ) -> Result<Self, ScheduleError> {
        let cluster = Arc::new(cluster);
        let plan = schedule.resolve(&cluster, &options.network, &P::replaceable(&cluster))?;
        let ids: Vec<NodeId> = cluster.nodes().map(|node| node.id).collect();
        let highest = ids.iter().map(|id| id.0).max().unwrap_or(0);
        let mut dense = vec![u32::MAX; highest as usize + 1];
        let mut gateways = Vec::new();
        let mut nodes = Vec::new();
        for (index, node) in (0_u32..).zip(cluster.nodes()) {
            if let Some(place) = dense.get_mut(node.id.0 as usize) {
                *place = index;
            }
            if node.role == Role::Gateway {
                gateways.push((index, node.id));
            }
            let mut rng = Rng::stream(options.seed, "clock", u64::from(node.id.0));
            nodes.push(Node {
                id: node.id,
                role: node.role,
                process: Process::Down,
                disk: Disk::new(node.id, options.disk),
                clock: NodeClock::draw(&options.clock, &mut rng),
                cpu: Cpu::new(options.cpu),
                work: Arc::default(),
                wake: None,
                held_down: 0,
                paused: 0,
                backlog: VecDeque::new(),
                disk_stopped: false,
            });
        }
        let stream = |label| Rng::stream(options.seed, label, 0);
        let mut load = Load::new(
            options.load.clone(),
            workload,
            P::GENERAL,
            &cluster,
            &gateways,
            stream("workload"),
        );
        load.measured = Time::ZERO + options.warmup..Time::ZERO + options.duration;
        if options.check_outcomes {
            load.oracle = Some(Oracle::new(load.values()));
        }
        let world = World {
            now: Time::ZERO,
            queue: Queue::default(),
            network: Network::new(options.network, &cluster, &ids, stream("network")),
            load,
            lives: vec![0; ids.len()],
            up: vec![false; ids.len()],
            ids,
            dense,
            traffic: Traffic::between(cluster.nodes().map(|node| (node.role, node.region))),
            notes: BTreeMap::new(),
            trace: None,
            hash: Digest::default(),
            disk_rng: stream("disk"),
            manual: None,
            events: 0,
            events_max: u64::MAX,
            failure: None,
            watch: options.check_outcomes.then(Watch::default),
            beyond: None,
            limits: options.limits,
        };
        let config = Arc::new(config);
        let injected = BTreeMap::new();
        let is_audited = false;
        let mut simulation =
            Self { cluster, config, options, nodes, world, plan, injected, is_audited };
        simulation.schedule_faults();
        Ok(simulation)
    }

    /// Fails the run as stuck after this many events. A limit on simulated time does not bound the
    /// work of a message storm.
    pub fn limit_events(&mut self, events: u64) {
        self.world.events_max = events;
    }

    /// Sends every attempt at a transaction to `sink` as it ends.
    pub fn keep_history(&mut self, sink: HistorySink) {
        self.world.load.history = Some(sink);
    }

    /// Sends every line of the trace to `sink`.
    pub fn keep_trace(&mut self, sink: TraceSink) {
        self.world.trace = Some(sink);
    }

    /// The time.
    #[must_use]
    pub fn now(&self) -> Time {
        self.world.now
    }

    /// Events handled so far.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.world.events
    }

    /// Runs to the end: callers arrive for [`Options::duration`], what is under way then has
    /// [`Options::drain`] to end, and the workload's final audit closes the run.
    ///
    /// # Errors
    /// The first promise that was broken.
    pub fn run(&mut self) -> Result<Report, Failure> {
        self.start_nodes();
        self.start_load();
        self.run_until(Time::ZERO + self.options.duration)?;
        self.drain(self.options.drain)?;
        if self.world.load.outstanding() == 0 && !self.is_beyond() {
            self.audit()?;
            self.is_audited = !self.is_beyond();
        }
        Ok(self.report())
    }

    /// True if a disk lost writes that it had reported durable. Nothing that follows is judged, and
    /// [`Simulation::run_until`] goes no further.
    #[must_use]
    pub fn is_beyond(&self) -> bool {
        self.world.beyond.is_some()
    }

    /// Starts every node that is down and not held down.
    pub fn start_nodes(&mut self) {
        for index in 0..self.nodes.len() {
            self.start_node(index as u32);
        }
    }

    /// Lets callers begin.
    pub fn start_load(&mut self) {
        let now = self.world.now;
        if let Some(first) = self.world.load.start(now) {
            self.world.queue.push(first, Event::Arrival);
        }
        self.world.take_due();
    }

    /// Handles every event due by `limit`.
    ///
    /// # Errors
    /// The first promise that was broken.
    pub fn run_until(&mut self, limit: Time) -> Result<(), Failure> {
        let (mut instant, mut at_once) = (self.world.now, 0);
        if self.is_beyond() {
            return Ok(());
        }
        while let Some((at, event)) = self.world.queue.pop(limit) {
            at_once = if at == instant { at_once + 1 } else { 0 };
            instant = at;
            self.world.now = at;
            self.handle(event);
            if at_once > EVENTS_AT_ONCE {
                self.world.fail(
                    FailureKind::Stuck,
                    "time does not advance: events at one moment do not end".into(),
                );
            }
            if self.world.events > self.world.events_max {
                let most = self.world.events_max;
                let detail = format!("the run did not settle within {most} events");
                self.world.fail(FailureKind::Stuck, detail);
            }
            if let Some(failure) = self.world.failure.take() {
                return Err(failure);
            }
            if self.is_beyond() {
                return Ok(());
            }
        }
        self.world.now = self.world.now.max(limit);
        Ok(())
    }

    /// No new transactions; those under way have `limit` to end.
    ///
    /// # Errors
    /// The first promise that was broken; a transaction that did not end, if outcomes are checked.
    pub fn drain(&mut self, limit: Duration) -> Result<(), Failure> {
        self.world.load.stop();
        self.wait_for_outstanding(0, limit)?;
        self.judge_ended(limit)
    }

    /// No new transactions; those under way go on as long as one of them ends within every `limit`.
    /// A protocol whose transactions queue up for their locks is slow, not stuck.
    ///
    /// # Errors
    /// The first promise that was broken; a transaction that did not end, if outcomes are checked.
    pub fn drain_while_moving(&mut self, limit: Duration) -> Result<(), Failure> {
        self.world.load.stop();
        let mut before = self.world.load.outstanding();
        while let Some(fewer) = before.checked_sub(1) {
            self.wait_for_outstanding(fewer, limit)?;
            if self.world.load.outstanding() == before {
                break;
            }
            before = self.world.load.outstanding();
        }
        self.judge_ended(limit)
    }

    fn judge_ended(&mut self, limit: Duration) -> Result<(), Failure> {
        if self.world.load.outstanding() > 0 && self.options.check_outcomes && !self.is_beyond() {
            let stuck: Vec<String> =
                self.world.load.under_way().take(5).map(|(txn, _)| txn.to_string()).collect();
            let count = self.world.load.outstanding();
            self.world.fail(
                FailureKind::Stuck,
                format!(
                    "{count} transactions are still pending after {limit:?}: {}",
                    stuck.join(", ")
                ),
            );
        }
        self.world.failure.take().map_or(Ok(()), Err)
    }

    /// Until at most so many are under way, or `limit` has passed.
    fn wait_for_outstanding(&mut self, most: u32, limit: Duration) -> Result<(), Failure> {
        let deadline = self.world.now + limit;
        let is_due = |run: &Self| run.world.load.outstanding() > most && run.world.now < deadline;
        while is_due(self) && !self.is_beyond() {
            let step = self.world.now + Duration::from_millis(50);
            self.run_until(step.min(deadline))?;
        }
        Ok(())
    }

    /// Reads everything at the end: the workload's own audit, and if outcomes are checked every
    /// key that a committed transaction touched, against what was acknowledged.
    ///
    /// # Errors
    /// What is lost or does not add up.
    pub fn audit(&mut self) -> Result<(), Failure> {
        let mut requests = self.world.load.final_requests();
        requests.extend(self.world.load.final_reads());
        for request in requests {
            let now = self.world.now;
            self.world.load.issue_final(request, now);
            self.world.take_due();
            self.wait_for_outstanding(0, self.options.drain)?;
            if self.is_beyond() {
                return Ok(());
            }
            if self.world.load.outstanding() > 0 {
                let detail = "a read-only transaction of the final audit is still pending".into();
                self.world.fail(FailureKind::Stuck, detail);
            }
            if let Some(failure) = self.world.failure.take() {
                return Err(failure);
            }
        }
        if let Err(detail) = self.world.load.audit_end() {
            self.world.fail(FailureKind::Promise, detail);
        }
        self.world.failure.take().map_or(Ok(()), Err)
    }

    /// Lets time pass until nothing is left over at any machine that is up and the copies of every
    /// state agree, for at most `limit`.
    ///
    /// # Errors
    /// What is left over then, or does not agree.
    pub fn settle(&mut self, limit: Duration) -> Result<(), Failure> {
        self.settle_within(limit, false)
    }

    /// The same, and goes on as long as less is left over within every `limit`: what links that lose packets carry
    /// is little, and a server that was away may have much to receive.
    ///
    /// # Errors
    /// What is left over then, or does not agree.
    pub fn settle_while_moving(&mut self, limit: Duration) -> Result<(), Failure> {
        self.settle_within(limit, true)
    }

    fn settle_within(&mut self, limit: Duration, is_extended: bool) -> Result<(), Failure> {
        let mut deadline = self.world.now + limit;
        let mut least = usize::MAX;
        let mut copies = Copies::default();
        // Irregular, so that it never keeps step with a group that appends something every so often,
        // and at times soon again: a follower is where its leader was a round trip before.
        let mut look = 0_u64;
        loop {
            if self.is_beyond() {
                return Ok(());
            }
            let (kind, detail) = match self.rest(&mut copies) {
                Ok(()) => return Ok(()),
                Err(Unrest::Differs(detail)) => (FailureKind::Claim, detail),
                Err(Unrest::Left(detail)) => (FailureKind::Stuck, detail),
            };
            if is_extended && self.left_over() < least {
                least = self.left_over();
                deadline = self.world.now + limit;
            }
            if kind == FailureKind::Claim || self.world.now >= deadline {
                return Err(Failure { at: self.world.now, kind, detail });
            }
            self.run_until(self.world.now + Duration::from_millis(1 + look * 37 % 101))?;
            look += 1;
        }
    }

    /// How much is left over, at all machines that are up.
    fn left_over(&self) -> usize {
        let mut all = 0;
        for node in &self.nodes {
            let held = on_host!(&node.process, host => host.machine().leaks(), continue);
            all += held.into_iter().map(|(_, count)| count).sum::<usize>();
        }
        all
    }

    fn rest(&self, seen: &mut Copies) -> Result<(), Unrest> {
        for node in &self.nodes {
            on_host!(&node.process, host => watch::leaks(node.id, host.machine())?, continue);
        }
        let mut copies = Vec::new();
        for node in &self.nodes {
            let held = on_host!(&node.process, host => host.machine().replica_digests(), continue);
            copies.extend(held.into_iter().map(|copy| (node.id, copy)));
        }
        seen.compare(&copies)
    }

    /// The figures so far. What is under way counts as unknown and is dropped.
    pub fn report(&mut self) -> Report {
        let outstanding = self.world.load.outstanding();
        self.world.load.abandon();
        let total = self.world.traffic.total();
        let load = &mut self.world.load;
        (load.counters.messages, load.counters.bytes) = (total.messages, total.bytes);
        let run = Run {
            protocol: P::name(&self.config).into(),
            topology: self.cluster.topology.name.clone(),
            workload: load.workload_name(),
            seed: self.options.seed,
            measured: self.options.duration.saturating_sub(self.options.warmup),
            simulated: self.world.now.since(Time::ZERO),
            wall: Duration::ZERO,
            events: self.world.events,
        };
        Report {
            result: RunResult::new(run, &load.latencies, &load.counters, None),
            cdf_ms: load.latencies.cdf_ms(),
            regions: load.latencies.by_region(
                self.cluster.topology.regions().map(|region| self.cluster.topology.name_of(region)),
            ),
            traffic: self.world.traffic.clone(),
            notes: self.world.notes.iter().map(|(n, &c)| (format!("{n:?}"), c)).collect(),
            injected: self.injected.clone(),
            orders: self.orders(),
            trace_hash: self.trace_hash(),
            outstanding,
            cpu: self.nodes.iter().map(|node| node.cpu.busy()).sum(),
            beyond: self.world.beyond.clone(),
            audited: (!self.world.load.final_requests().is_empty()).then_some(self.is_audited),
        }
    }

    /// A hash of everything that happened so far.
    #[must_use]
    pub fn trace_hash(&self) -> u64 {
        self.world.hash.value()
    }

    pub(crate) fn node(&mut self, index: u32) -> &mut Node<P> {
        let node = self.nodes.get_mut(index as usize);
        node.unwrap_or_else(|| unreachable!("nodes are numbered densely and never removed"))
    }

    fn schedule_faults(&mut self) {
        for (entry, item) in (0_u32..).zip(&self.plan.entries) {
            self.world.queue.push(item.at, Event::Fault { entry, is_heal: false });
            if let Some(until) = item.until {
                self.world.queue.push(until, Event::Fault { entry, is_heal: true });
            }
        }
    }

    fn handle(&mut self, event: Event<P>) {
        match event {
            Event::Arrive { flight, is_ready } => self.arrive(flight, is_ready),
            Event::Input { node, life, input, hops } => {
                if self.world.life(node) == life {
                    self.input(node, *input, hops);
                }
            }
            Event::Wake { node } => self.wake(node),
            Event::Flushed { node, life } => self.flushed(node, life),
            Event::Arrival => {
                let now = self.world.now;
                if let Some(next) = self.world.load.arrive(now) {
                    self.world.queue.push(next, Event::Arrival);
                }
            }
            Event::Client { client, serial } => {
                let World { load, up, now, .. } = &mut self.world;
                let is_up = |node: u32| up.get(node as usize).copied().unwrap_or(false);
                if let Some((gateway, input, hops)) = load.wake(*now, (client, serial), is_up) {
                    self.call(gateway, input, hops);
                }
            }
            Event::Fault { entry, is_heal } => self.fault(entry, is_heal),
        }
        self.world.take_due();
    }

    /// The processor of a node is as fast as ever again, for what waits for it too.
    pub(crate) fn speed_up(&mut self, index: u32) {
        let now = self.world.now;
        let factor = self.node(index).cpu.speed_up(now);
        let is_waiting = |event: &Event<P>| match event {
            Event::Arrive { flight, is_ready } => *is_ready && flight.to == index,
            Event::Input { node, .. } => *node == index,
            Event::Wake { .. }
            | Event::Flushed { .. }
            | Event::Arrival
            | Event::Client { .. }
            | Event::Fault { .. } => false,
        };
        if factor > 1 {
            let when = |event: &_, at| if is_waiting(event) { sooner(at, now, factor) } else { at };
            self.world.queue.reschedule(when);
        }
    }

    fn arrive(&mut self, flight: InFlight<P>, is_ready: bool) {
        let (now, to) = (self.world.now, flight.to);
        if self.world.is_cut(&flight) {
            self.world.lose(&flight);
            return;
        }
        let node = self.node(to);
        if node.paused > 0 {
            node.backlog.push_back(Event::Arrive { flight, is_ready });
            return;
        }
        if !is_ready && flight.from != to && !node.cpu.is_infinite(now) {
            let ready = node.cpu.admit(now, flight.bytes as usize, flight.msg.keys());
            if ready > now {
                self.world.queue.push(ready, Event::Arrive { flight, is_ready: true });
                return;
            }
        }
        self.accept(flight);
    }

    /// A message has arrived and had its CPU time.
    pub(crate) fn accept(&mut self, flight: InFlight<P>) {
        let InFlight { from, to, sent, hops, msg, .. } = flight;
        let from = self.world.id(from);
        let world = &mut self.world;
        world.log(to, TraceEvent::Receive, Some(from), Some(sent), msg.txn(), msg.kind(), || {
            format!("{msg:?}")
        });
        self.input(to, Input::Message { from, msg }, hops);
    }

    /// A caller calls a gateway.
    pub(crate) fn call(&mut self, gateway: u32, input: Input<P>, hops: u16) {
        let (now, life) = (self.world.now, self.world.life(gateway));
        let keys = match &input {
            Input::Begin(txn) | Input::Resolve { txn, .. } => txn.reads.len() + txn.writes.len(),
            Input::Read { keys, .. } => keys.len(),
            Input::Decide { .. }
            | Input::Message { .. }
            | Input::Timer(_)
            | Input::Durable(_)
            | Input::Admin(_) => 0,
        };
        let node = self.node(gateway);
        if node.paused > 0 {
            let input = Box::new(input);
            node.backlog.push_back(Event::Input { node: gateway, life, input, hops });
        } else if !node.cpu.is_infinite(now) {
            let ready = node.cpu.admit(now, 0, keys);
            let input = Box::new(input);
            self.world.queue.push(ready, Event::Input { node: gateway, life, input, hops });
        } else {
            self.input(gateway, input, hops);
        }
    }

    /// Gives a machine an input, and carries out what it wants.
    pub(crate) fn input(&mut self, index: u32, input: Input<P>, hops: u16) {
        let now = self.world.now;
        if self.node(index).paused > 0 {
            // It had its CPU time before the pause began.
            let life = self.world.life(index);
            let event = Event::Input { node: index, life, input: Box::new(input), hops };
            self.node(index).backlog.push_back(event);
            return;
        }
        self.world.log_input(index, &input);
        let node = self.node(index);
        let clock = node.clock.read(now);
        on_host!(&mut node.process, host => {
            host.step(now, clock, input);
            host.flush(now, clock);
        }, return);
        self.world.events += 1;
        self.settle_input(index, hops);
    }

    fn wake(&mut self, index: u32) {
        let now = self.world.now;
        let node = self.node(index);
        if node.wake != Some(now) {
            return;
        }
        node.wake = None;
        if node.paused > 0 {
            return;
        }
        self.fire(index);
    }

    /// Expires every timer of a node that is due.
    fn fire(&mut self, index: u32) {
        // A handler may set a timer that is due at once; the bound on events at one instant stops
        // a machine that always does.
        for _ in 0..10_000 {
            if !self.fire_one(index) {
                break;
            }
        }
        self.rearm(index);
    }

    /// Expires a node's earliest timer, if it is due.
    fn fire_one(&mut self, index: u32) -> bool {
        let now = self.world.now;
        let node = self.node(index);
        let clock = node.clock.read(now);
        let fired = on_host!(&mut node.process, host => {
            let fired = host.fire_next(now, clock);
            host.flush(now, clock);
            fired
        }, None);
        let Some(timer) = fired else { return false };
        self.world.events += 1;
        self.world.log(index, TraceEvent::Timer, None, None, None, "-", || format!("{timer:?}"));
        self.settle_input(index, 0);
        true
    }

    fn flushed(&mut self, index: u32, life: u32) {
        if self.world.life(index) != life {
            return;
        }
        let node = self.node(index);
        let failure = node.disk.failure.take();
        match failure {
            Some(DiskFailure::Full | DiskFailure::FsyncError) => {
                self.stop_by_disk(index);
                return;
            }
            Some(DiskFailure::CrashBeforeReport) => {
                node.disk.finish_flush();
                self.stop_by_disk(index);
                return;
            }
            Some(DiskFailure::CrashAfterReport) | None => {}
        }
        if let Some((ticket, hops)) = self.node(index).disk.finish_flush() {
            self.input(index, Input::Durable(ticket), hops);
        }
        if failure.is_some() {
            self.stop_by_disk(index);
        } else {
            self.start_flush(index);
        }
    }

    fn stop_by_disk(&mut self, index: u32) {
        let node = self.node(index);
        node.disk_stopped = true;
        node.held_down += 1;
        self.crash(index, false);
    }

    /// Carries out what a machine wants after an input, and checks it.
    fn settle_input(&mut self, index: u32, hops: u16) {
        let Self { nodes, world, options, .. } = self;
        let every = options.invariants_every;
        let is_checked = every > 0 && world.events.is_multiple_of(every);
        let Some(node) = nodes.get_mut(index as usize) else { return };
        let Node { process, disk, cpu, work, .. } = node;
        let effects = on_host!(process, host => {
            if is_checked {
                host.machine().assert_invariants();
            }
            host.drain()
        }, return);
        cpu.charge_work(world.now, &work.take());
        for effect in effects {
            world.carry_out(index, (disk, cpu), effect, hops);
        }
        self.start_flush(index);
        self.rearm(index);
    }

    fn start_flush(&mut self, index: u32) {
        if self.world.manual.is_some() {
            return;
        }
        let Self { nodes, world, .. } = self;
        let Some(node) = nodes.get_mut(index as usize) else { return };
        if let Some(done) = node.disk.start_flush(world.now, &mut world.disk_rng) {
            let life = world.life(index);
            world.queue.push(done, Event::Flushed { node: index, life });
        }
    }

    /// Schedules the node's next wake-up, if an earlier one is needed than the one scheduled.
    fn rearm(&mut self, index: u32) {
        if self.world.manual.is_some() {
            return;
        }
        let now = self.world.now;
        let node = self.node(index);
        let Some(deadline) = on_host!(&node.process, host => host.next_deadline(), None) else {
            return;
        };
        let deadline = deadline.max(now);
        if node.paused == 0 && node.wake.is_none_or(|wake| deadline < wake) {
            node.wake = Some(deadline);
            self.world.queue.push(deadline, Event::Wake { node: index });
        }
    }

    /// Stops a node as a power cut would.
    pub(crate) fn crash(&mut self, index: u32, torn: bool) {
        let Self { nodes, world, .. } = self;
        let Some(node) = nodes.get_mut(index as usize) else { return };
        if matches!(node.process, Process::Down) {
            return;
        }
        node.process = Process::Down;
        node.wake = None;
        node.backlog.clear();
        let lost = node.disk.crash(torn, &mut world.disk_rng);
        node.cpu.reset(world.now);
        let role = node.role;
        world.log(index, TraceEvent::Fault, None, None, None, "crash", String::new);
        world.set_down(index);
        for flight in world.network.crash(world.now, index) {
            world.lose(&flight);
        }
        if role == Role::Gateway {
            world.load.on_gateway_crash(world.now, index);
        }
        self.lose_writes(index, lost, "in a crash, because its disk had lied");
    }

    /// A node's disk lost writes that it had reported durable, if `lost` is not zero.
    pub(crate) fn lose_writes(&mut self, index: u32, lost: u64, how: &str) {
        if lost == 0 {
            return;
        }
        let (at, node) = (self.world.now, self.world.id(index));
        let detail = format!("{node} lost {lost} durable writes {how}");
        self.world
            .log(index, TraceEvent::Fault, None, None, None, "lost-writes", || detail.clone());
        *self.injected.entry("lost-writes").or_default() += 1;
        self.world.beyond.get_or_insert(Beyond { at, detail });
    }

    /// Starts a node with what its disk kept, unless it runs, a fault holds it down, or it refuses its
    /// disk.
    pub(crate) fn start_node(&mut self, index: u32) {
        let now = self.world.now;
        let life = self.world.life(index);
        let (cluster, config) = (self.cluster.clone(), self.config.clone());
        let seed = self.options.seed;
        let node = self.node(index);
        if !matches!(node.process, Process::Down) || node.held_down > 0 {
            return;
        }
        let recovered = match node.disk.open(node.id) {
            Ok(recovered) => recovered,
            Err(refusal) => {
                *self.injected.entry("refused-start").or_default() += 1;
                self.world.log(index, TraceEvent::Fault, None, None, None, "refuse", || {
                    refusal.to_string()
                });
                return;
            }
        };
        let (engine, workers) = (Box::new(node.disk.engine()), node.work.clone());
        let setup = Setup { node: node.id, cluster, config, engine, workers };
        let clock = node.clock.read(now);
        let stream = (u64::from(life) << 32) | u64::from(node.id.0);
        node.process = match node.role {
            Role::Server => {
                let rng = Rng::stream(seed, "server", stream);
                Process::Server(Box::new(Host::start(setup, recovered, rng, now, clock)))
            }
            Role::Gateway => {
                let rng = Rng::stream(seed, "gateway", stream);
                Process::Gateway(Box::new(Host::start(setup, recovered, rng, now, clock)))
            }
        };
        if let Some(up) = self.world.up.get_mut(index as usize) {
            *up = true;
        }
        self.world.log(index, TraceEvent::Fault, None, None, None, "start", String::new);
        self.settle_input(index, 0);
    }

    /// A paused node goes on: first with what arrived meanwhile, then with its timers.
    pub(crate) fn resume(&mut self, index: u32) {
        let now = self.world.now;
        let node = self.node(index);
        if node.paused > 0 {
            return;
        }
        let backlog = std::mem::take(&mut node.backlog);
        node.wake = None;
        for event in backlog {
            self.world.queue.push(now, event);
        }
        self.rearm(index);
    }

    /// A machine's one-line state; `down` if it does not run.
    #[must_use]
    pub fn state_of(&self, node: NodeId) -> String {
        let found = self.nodes.iter().find(|candidate| candidate.id == node);
        let Some(found) = found else { return "not in the cluster".into() };
        on_host!(&found.process, host => host.machine().to_string(), "down".into())
    }

    /// A machine's running timers by their `Debug` names, earliest first.
    #[must_use]
    pub fn timers_of(&self, node: NodeId) -> Vec<(Time, String)> {
        let found = self.nodes.iter().find(|candidate| candidate.id == node);
        let Some(found) = found else { return Vec::new() };
        on_host!(
            &found.process,
            host => host.timers().iter().map(|(at, timer)| (at, format!("{timer:?}"))).collect(),
            Vec::new()
        )
    }

    /// Sends what links held while they were blocked.
    pub(crate) fn release(&mut self, released: Released<InFlight<P>>) {
        for flight in &released.lost {
            self.world.lose(flight);
        }
        for flight in released.send {
            self.world.transmit(flight);
        }
    }
}

/// Step-by-step control.
#[cfg_attr(
    not(feature = "golden"),
    expect(dead_code, reason = "only golden scripts take control, and they are a feature")
)]
impl<P: Protocol> Simulation<P> {
    /// From now on messages, flushes and timers wait to be asked for.
    pub(crate) fn take_control(&mut self, echo: EchoSink<P>) {
        self.world.manual = Some(Manual { held: Vec::new(), next: 0, echo });
    }

    /// Everything held back goes its way from now on.
    pub(crate) fn give_control_back(&mut self) {
        let Some(manual) = self.world.manual.take() else { return };
        for (_, flight) in manual.held {
            self.world.transmit(flight);
        }
        for index in 0..u32::try_from(self.nodes.len()).unwrap_or(u32::MAX) {
            self.start_flush(index);
            self.rearm(index);
        }
    }

    /// Delivers or loses message `number`, and forgets it unless it `stays`.
    pub(crate) fn step_message(&mut self, number: u32, arrives: bool, stays: bool) {
        let Some(manual) = &mut self.world.manual else { return };
        let Some(at) = manual.held.iter().position(|(held, _)| *held == number) else { return };
        let (_, flight) = manual.held.remove(at);
        if stays {
            let msg = flight.msg.clone();
            manual.held.insert(at, (number, InFlight { msg, ..flight }));
        }
        if arrives {
            self.arrive(flight, true);
        } else {
            self.world.lose(&flight);
        }
    }

    /// Makes everything that a node wrote durable, and tells it. False if there was nothing.
    pub(crate) fn flush_disk(&mut self, index: u32) -> bool {
        let Self { nodes, world, .. } = self;
        let Some(node) = nodes.get_mut(index as usize) else { return false };
        node.disk.start_flush(world.now, &mut world.disk_rng);
        let Some((ticket, hops)) = node.disk.finish_flush() else { return false };
        self.input(index, Input::Durable(ticket), hops);
        true
    }

    /// Expires a node's earliest timer, moving time on to its deadline. False if it has none.
    pub(crate) fn fire_first(&mut self, index: u32) -> bool {
        let node = self.node(index);
        let Some(deadline) = on_host!(&node.process, host => host.next_deadline(), None) else {
            return false;
        };
        self.world.now = self.world.now.max(deadline);
        self.fire_one(index)
    }
}

impl<P: Protocol> World<P> {
    fn life(&self, node: u32) -> u32 {
        self.lives.get(node as usize).copied().unwrap_or(0)
    }

    pub(crate) fn id(&self, node: u32) -> NodeId {
        self.ids.get(node as usize).copied().unwrap_or_default()
    }

    fn set_down(&mut self, node: u32) {
        if let Some(up) = self.up.get_mut(node as usize) {
            *up = false;
        }
        if let Some(life) = self.lives.get_mut(node as usize) {
            *life += 1;
        }
    }

    pub(crate) fn fail(&mut self, kind: FailureKind, detail: String) {
        let at = self.now;
        self.failure.get_or_insert(Failure { at, kind, detail });
    }

    /// Schedules what clients want, and notices what they complain of.
    fn take_due(&mut self) {
        for due in self.load.due.drain(..) {
            let event = Event::Client { client: due.client, serial: due.serial };
            self.queue.push(due.at, event);
        }
        if let Some(problem) = self.load.failure.take() {
            self.fail(FailureKind::Promise, problem);
        }
    }

    fn carry_out(
        &mut self,
        index: u32,
        (disk, cpu): (&mut Disk<P>, &mut Cpu),
        effect: Effect<P>,
        hops: u16,
    ) {
        match effect {
            Effect::Send { to, msg } => self.send(index, cpu, (to, msg), hops),
            Effect::Persist { ticket, record } => {
                self.judge_record(index, &record);
                disk.write(ticket, record, hops);
            }
            Effect::Checkpoint { ticket, versions, records } => {
                for record in &records {
                    self.judge_record(index, record);
                }
                disk.checkpoint(ticket, versions, records, hops);
            }
            Effect::Reads { txn, reads } => {
                self.log(index, TraceEvent::Reads, None, None, Some(txn), "-", || describe(&reads));
                self.load.on_reads(self.now, index, txn, reads, hops);
            }
            Effect::Finish { txn, outcome, path } => {
                self.log(index, TraceEvent::Finish, None, None, Some(txn), path, || {
                    outcome.to_string()
                });
                if let Some(watch) = self.watch.as_mut()
                    && !self.load.only_reads(txn)
                {
                    let told = watch.told(txn, outcome);
                    self.note_claim(told);
                }
                self.load.on_finish(self.now, index, (txn, outcome, path), hops);
            }
            Effect::Note(note) => {
                self.log(index, TraceEvent::Note, None, None, None, "-", || format!("{note:?}"));
                *self.notes.entry(note).or_default() += 1;
            }
            Effect::Claim(claim) => {
                let node = self.id(index);
                let fits = self.watch.as_mut().map_or(Ok(()), |watch| watch.claim(node, claim));
                self.note_claim(fits);
            }
        }
    }

    /// A server that is given a larger record cannot go on, and would not get over it by a restart.
    fn judge_record(&mut self, index: u32, record: &P::Record) {
        let (bytes, most) = (P::record_size(record), self.limits.record_bytes);
        if bytes > most {
            let (node, what) = (self.id(index), shortened(format!("{record:?}")));
            let detail = format!("{node} wrote a record of {bytes} bytes, over {most}: {what}");
            self.fail(FailureKind::Limit, detail);
        }
    }

    fn note_claim(&mut self, verdict: Result<(), String>) {
        if let Err(detail) = verdict {
            self.fail(FailureKind::Claim, detail);
        }
    }

    fn send(&mut self, from: u32, cpu: &mut Cpu, (to, msg): (NodeId, P::Msg), hops: u16) {
        let to_index = self.dense.get(to.0 as usize).copied().unwrap_or(u32::MAX);
        if to_index == u32::MAX {
            let from = self.id(from);
            let kind = msg.kind();
            self.fail(
                FailureKind::Promise,
                format!("{from} sent {kind} to {to}, which is not in the cluster"),
            );
            return;
        }
        let is_wan = self.network.is_wan(from, to_index);
        let bytes = msg.wire_size();
        let most = self.limits.message_bytes;
        if bytes > most {
            let (node, kind) = (self.id(from), msg.kind());
            let detail = format!("{node} sent {kind} of {bytes} bytes to {to}, over {most}");
            self.fail(FailureKind::Limit, detail);
        }
        if from != to_index {
            cpu.charge_send(self.now, bytes);
            if self.load.measured.contains(&self.now) {
                self.traffic.count(msg.kind(), from, to_index, is_wan, bytes);
            }
        }
        let lives = (self.life(from), self.life(to_index));
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let hops = hops.saturating_add(u16::from(is_wan));
        let flight = InFlight { from, to: to_index, lives, sent: self.now, bytes, hops, msg };
        match &mut self.manual {
            Some(manual) => manual.hold(flight),
            None => self.transmit(flight),
        }
    }

    fn transmit(&mut self, flight: InFlight<P>) {
        let (now, from, to) = (self.now, flight.from, flight.to);
        let lane = flight.msg.lane();
        match self.network.send_in(lane, now, (from, to), flight.bytes as usize) {
            Fate::Arrives(at, again) => {
                if let Some(again) = again {
                    let flight = InFlight { msg: flight.msg.clone(), ..flight };
                    self.queue.push(again, Event::Arrive { flight, is_ready: false });
                }
                self.queue.push(at, Event::Arrive { flight, is_ready: false });
            }
            Fate::Lost => self.lose(&flight),
            Fate::Stalls => {
                for lost in self.network.stall(now, from, to, flight) {
                    self.lose(&lost);
                }
            }
        }
    }

    /// True if the connection that carried a message broke before it arrived.
    fn is_cut(&self, flight: &InFlight<P>) -> bool {
        let &InFlight { from, to, lives, sent, .. } = flight;
        let is_down = !self.up.get(to as usize).copied().unwrap_or(false);
        is_down
            || self.life(to) != lives.1
            || (self.life(from) != lives.0 && self.network.was_cut(from, to, sent))
    }

    pub(crate) fn lose(&mut self, flight: &InFlight<P>) {
        let to = self.id(flight.to);
        let (msg, sent) = (&flight.msg, flight.sent);
        self.log(
            flight.from,
            TraceEvent::Lose,
            Some(to),
            Some(sent),
            msg.txn(),
            msg.kind(),
            || format!("{msg:?}"),
        );
    }

    fn log_input(&mut self, node: u32, input: &Input<P>) {
        match input {
            Input::Begin(txn) => {
                self.log(node, TraceEvent::Begin, None, None, Some(txn.id), "-", || {
                    format!("{txn:?}")
                });
            }
            Input::Read { txn, keys } => {
                self.log(node, TraceEvent::Read, None, None, Some(*txn), "-", || {
                    format!("{keys:?}")
                });
            }
            Input::Decide { txn, decision } => {
                self.log(node, TraceEvent::Decide, None, None, Some(*txn), "-", || {
                    format!("{decision:?}")
                });
            }
            Input::Resolve { txn, decision, .. } => {
                self.log(node, TraceEvent::Resolve, None, None, Some(txn.id), "-", || {
                    format!("{decision:?}")
                });
            }
            Input::Durable(ticket) => {
                self.log(node, TraceEvent::Durable, None, None, None, "-", || ticket.to_string());
            }
            Input::Admin(order) => {
                self.log(node, TraceEvent::Fault, None, None, None, "admin", || {
                    format!("{order:?}")
                });
            }
            // Logged where they come from, with what is known there.
            Input::Message { .. } | Input::Timer(_) => {}
        }
    }

    /// Adds to the running hash and, if one is kept, to the trace.
    #[expect(clippy::too_many_arguments, reason = "the fields of a trace line, in their order")]
    pub(crate) fn log(
        &mut self,
        node: u32,
        event: TraceEvent,
        peer: Option<NodeId>,
        sent: Option<Time>,
        txn: Option<TxnId>,
        kind: &str,
        detail: impl FnOnce() -> String,
    ) {
        self.hash.add(self.now.0);
        self.hash.add((u64::from(node) << 32) | (event as u64));
        if let Some(peer) = peer {
            self.hash.add((u64::from(peer.0) << 32) | 1);
        }
        if let Some(txn) = txn {
            self.hash.add(txn.client.0.rotate_left(40) ^ txn.counter.rotate_left(16));
            self.hash.add(u64::from(txn.attempt));
        }
        self.hash.add_text(kind);
        if let Some(sink) = &mut self.trace {
            let node = self.ids.get(node as usize).copied().unwrap_or_default();
            let (at, kind, detail) = (self.now, kind.to_owned(), detail());
            sink(&Line { at, node, event, peer, sent, txn, kind, detail });
        }
    }
}

/// The beginning of a long text.
fn shortened(mut text: String) -> String {
    let end = text.char_indices().map(|(at, _)| at).take_while(|at| *at <= 160).last();
    text.truncate(end.unwrap_or(0));
    text
}

/// Reads as `key=value(version)`, with `-` for a key that holds nothing.
fn describe(reads: &Reads) -> String {
    let one = |(key, read): (&Key, &Read)| {
        let value = read.value.as_ref().map_or_else(|| "-".into(), ToString::to_string);
        format!("{key}={value}({})", read.version)
    };
    reads.iter().map(one).collect::<Vec<_>>().join(" ")
}
