//! A cluster, its clients and its faults in virtual time: one seed gives one run.

mod delivery;
mod manual;
mod node;
mod report;
mod settle;
mod steps;
mod trace;

use std::sync::Arc;

use orthodrome_core::cluster::{Cluster, Role};
use orthodrome_core::digest::Digest;
use orthodrome_core::id::NodeId;
use orthodrome_core::limits::Limits;
use orthodrome_core::machine::{Input, Protocol};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::rng::Rng;
use orthodrome_core::time::{Duration, Time};
use orthodrome_core::trace::Line;
use orthodrome_eval::workload::Workload;

pub(crate) use self::delivery::{Flight, InFlight};
use self::manual::Manual;
pub(crate) use self::node::{Node, Process};
pub use self::report::{Failure, FailureKind, Report};
use crate::clock::ClockModel;
use crate::cpu::CpuModel;
use crate::disk::DiskModel;
use crate::fault::{Plan, Schedule, ScheduleError};
use crate::load::{Abilities, Asked, HistorySink, Load, LoadModel};
use crate::network::{Network, NetworkModel};
use crate::oracle::Oracle;
use crate::promise::Beyond;
use crate::queue::Queue;
use crate::traffic::Traffic;
use crate::watch::Watch;

/// All parameters of a run except the cluster, the protocol and the workload.
#[derive(Clone, Debug)]
pub struct Options {
    /// The seed of every random draw.
    pub seed: u64,
    /// The network.
    pub network: NetworkModel,
    /// Node clocks.
    pub clock: ClockModel,
    /// Disks.
    pub disk: DiskModel,
    /// The CPU-time model; none if processing takes no time.
    pub cpu: Option<CpuModel>,
    /// The limits of a record and of a message. A run in which a machine exceeds one has failed.
    pub limits: Limits,
    /// Clients.
    pub load: LoadModel,
    /// The part of the run before measurement begins.
    pub warmup: Duration,
    /// How long clients submit transactions. The measured part ends then.
    pub duration: Duration,
    /// How long pending transactions have to end after that, before they count as stuck.
    pub drain: Duration,
    /// Call a machine's `assert_invariants` after its input at every `n`th event; 1: after every
    /// input, 0: never.
    pub invariants_every: u64,
    /// Record every outcome that clients receive and every claim of machines, and check them
    /// against each other.
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

/// The receiver of trace lines.
pub type TraceSink = Box<dyn FnMut(&Line)>;

#[derive(Debug)]
enum Event<P: Protocol> {
    /// A message arrives; `is_ready` once it has had its CPU time.
    Arrive { flight: Flight<P>, is_ready: bool },
    /// A client's input has had its CPU time.
    Input { node: u32, incarnation: u32, input: Box<Input<P>>, hops: u16 },
    /// A node's timers are due.
    Wake { node: u32 },
    /// A flush is done.
    Flushed { node: u32, incarnation: u32 },
    /// An open-loop arrival.
    Arrival,
    /// A client acts.
    Client { client: u32, serial: u32 },
    /// A scan asks a server for names, after its gateway was paused.
    Ask { incarnation: u32, asked: Box<Asked> },
    /// An entry of the fault schedule begins or ends.
    Fault { entry: u32, is_heal: bool },
}

/// All parts of a run except its nodes.
pub(crate) struct Environment<P: Protocol> {
    pub(crate) now: Time,
    queue: Queue<Event<P>>,
    pub(crate) network: Network<Flight<P>>,
    pub(crate) load: Load,
    /// The number of crashes of each node.
    incarnations: Vec<u32>,
    pub(crate) up: Vec<bool>,
    ids: Vec<NodeId>,
    /// Dense number of each node id.
    dense: Vec<u32>,
    traffic: Traffic,
    notes: OrdMap<P::Note, u64>,
    trace: Option<TraceSink>,
    hash: Digest,
    pub(crate) disk_rng: Rng,
    /// Step-by-step control: messages are held, and flushes and timers wait for a command.
    pub(crate) manual: Option<Manual<P>>,
    events: u64,
    /// See [`Simulation::limit_events`].
    events_max: u64,
    pub(crate) failure: Option<Failure>,
    /// Checks claims against each other, if enabled.
    watch: Option<Watch>,
    /// Set when a disk has lost writes that it had reported as durable: the run is over.
    pub(crate) beyond: Option<Beyond>,
    limits: Limits,
}

/// A cluster of `P`, its clients and its faults.
pub struct Simulation<P: Protocol> {
    pub(crate) cluster: Arc<Cluster>,
    config: Arc<P::Config>,
    options: Options,
    pub(crate) nodes: Vec<Node<P>>,
    pub(crate) env: Environment<P>,
    pub(crate) plan: Plan,
    /// The number of faults injected, by kind.
    pub(crate) injected: OrdMap<&'static str, u64>,
    /// True if the final audit read the database and the workload found no violation.
    is_audited: bool,
}

/// A simulation of any protocol.
pub trait Simulated {
    /// See [`Simulation::keep_history`].
    fn keep_history(&mut self, sink: HistorySink);
    /// See [`Simulation::keep_trace`].
    fn keep_trace(&mut self, sink: TraceSink);
    /// The simulated time.
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

/// More events than any run has at one instant. Beyond this, time has stopped.
const EVENTS_AT_ONCE: u64 = 2_000_000;

impl<P: Protocol> Simulation<P> {
    /// Starts every node at time zero. Clients start with [`Simulation::run`].
    ///
    /// # Errors
    /// If the schedule does not fit the cluster.
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
        let (mut gateways, mut nodes) = (Vec::new(), Vec::new());
        for (index, node) in (0_u32..).zip(cluster.nodes()) {
            if let Some(place) = dense.get_mut(node.id.0 as usize) {
                *place = index;
            }
            if node.role == Role::Gateway {
                gateways.push((index, node.id));
            }
            nodes.push(Node::new(node.id, node.role, &options));
        }
        let stream = |label| Rng::stream(options.seed, label, 0);
        let mut load = Load::new(
            options.load.clone(),
            workload,
            Abilities::of::<P>(),
            &cluster,
            &gateways,
            stream("workload"),
        );
        load.measured = Time::ZERO + options.warmup..Time::ZERO + options.duration;
        if options.check_outcomes {
            load.oracle = Some(Oracle::new(load.values()));
        }
        let env = Environment {
            now: Time::ZERO,
            queue: Queue::default(),
            network: Network::new(
                (options.network, options.limits),
                &cluster,
                &ids,
                stream("network"),
            ),
            load,
            incarnations: vec![0; ids.len()],
            up: vec![false; ids.len()],
            ids,
            dense,
            traffic: Traffic::between(cluster.nodes().map(|node| (node.role, node.region))),
            notes: OrdMap::new(),
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
        let injected = OrdMap::new();
        let is_audited = false;
        let mut simulation =
            Self { cluster, config, options, nodes, env, plan, injected, is_audited };
        simulation.schedule_faults();
        Ok(simulation)
    }

    /// Fails the run as stuck after this many events. A limit on simulated time does not bound a
    /// storm of messages.
    pub fn limit_events(&mut self, events: u64) {
        self.env.events_max = events;
    }

    /// Sends every attempt at a transaction to `sink` as it ends.
    pub fn keep_history(&mut self, sink: HistorySink) {
        self.env.load.history = Some(sink);
    }

    /// Sends every line of the trace to `sink`.
    pub fn keep_trace(&mut self, sink: TraceSink) {
        self.env.trace = Some(sink);
    }

    /// The simulated time.
    #[must_use]
    pub fn now(&self) -> Time {
        self.env.now
    }

    /// The number of events processed so far.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.env.events
    }

    /// Runs to the end. Clients submit transactions for [`Options::duration`], pending ones then
    /// have [`Options::drain`] to end, and the workload's final audit closes the run.
    ///
    /// # Errors
    /// The first broken promise.
    pub fn run(&mut self) -> Result<Report, Failure> {
        self.start_nodes();
        self.start_load();
        self.run_until(Time::ZERO + self.options.duration)?;
        self.drain(self.options.drain)?;
        if self.env.load.outstanding() == 0 && !self.is_beyond() {
            self.audit()?;
            self.is_audited = !self.is_beyond();
        }
        Ok(self.report())
    }

    /// True if a disk has lost writes that it had reported as durable. Later events are not
    /// checked, and [`Simulation::run_until`] stops.
    #[must_use]
    pub fn is_beyond(&self) -> bool {
        self.env.beyond.is_some()
    }

    /// Starts the clients.
    pub fn start_load(&mut self) {
        let now = self.env.now;
        if let Some(first) = self.env.load.start(now) {
            self.env.queue.push(first, Event::Arrival);
        }
        self.env.take_due();
    }

    /// Processes every event due by `limit`.
    ///
    /// # Errors
    /// The first broken promise.
    pub fn run_until(&mut self, limit: Time) -> Result<(), Failure> {
        let (mut instant, mut at_once) = (self.env.now, 0);
        if self.is_beyond() {
            return Ok(());
        }
        while let Some((at, event)) = self.env.queue.pop(limit) {
            at_once = if at == instant { at_once + 1 } else { 0 };
            instant = at;
            self.env.now = at;
            self.handle(event);
            if at_once > EVENTS_AT_ONCE {
                self.env.fail(
                    FailureKind::Stuck,
                    "time does not advance: events at one moment do not end".into(),
                );
            }
            if self.env.events > self.env.events_max {
                let most = self.env.events_max;
                let detail = format!("the run did not settle within {most} events");
                self.env.fail(FailureKind::Stuck, detail);
            }
            if let Some(failure) = self.env.failure.take() {
                return Err(failure);
            }
            if self.is_beyond() {
                return Ok(());
            }
        }
        self.env.now = self.env.now.max(limit);
        Ok(())
    }

    pub(crate) fn node(&mut self, index: u32) -> &mut Node<P> {
        let node = self.nodes.get_mut(index as usize);
        node.unwrap_or_else(|| unreachable!("nodes are numbered densely and never removed"))
    }

    fn schedule_faults(&mut self) {
        for (entry, item) in (0_u32..).zip(&self.plan.entries) {
            self.env.queue.push(item.at, Event::Fault { entry, is_heal: false });
            if let Some(until) = item.until {
                self.env.queue.push(until, Event::Fault { entry, is_heal: true });
            }
        }
    }

    fn handle(&mut self, event: Event<P>) {
        match event {
            Event::Arrive { flight, is_ready } => self.arrive(flight, is_ready),
            Event::Input { node, incarnation, input, hops } => {
                if self.env.incarnation(node) == incarnation {
                    self.input(node, *input, hops);
                }
            }
            Event::Wake { node } => self.wake(node),
            Event::Flushed { node, incarnation } => self.flushed(node, incarnation),
            Event::Arrival => {
                let now = self.env.now;
                if let Some(next) = self.env.load.arrive(now) {
                    self.env.queue.push(next, Event::Arrival);
                }
            }
            Event::Client { client, serial } => {
                let Environment { load, up, now, .. } = &mut self.env;
                let is_up = |node: u32| up.get(node as usize).copied().unwrap_or(false);
                if let Some((gateway, input, hops)) = load.wake(*now, (client, serial), is_up) {
                    self.call(gateway, input, hops);
                }
            }
            Event::Ask { incarnation, asked } => {
                if self.env.incarnation(asked.gateway) == incarnation {
                    self.send_ask(asked);
                }
            }
            Event::Fault { entry, is_heal } => self.fault(entry, is_heal),
        }
        self.env.take_due();
        if !self.env.load.asks.is_empty() {
            self.send_asks();
        }
    }
}

impl<P: Protocol> Environment<P> {
    fn incarnation(&self, node: u32) -> u32 {
        self.incarnations.get(node as usize).copied().unwrap_or(0)
    }

    pub(crate) fn id(&self, node: u32) -> NodeId {
        self.ids.get(node as usize).copied().unwrap_or_default()
    }

    fn set_down(&mut self, node: u32) {
        if let Some(up) = self.up.get_mut(node as usize) {
            *up = false;
        }
        if let Some(incarnation) = self.incarnations.get_mut(node as usize) {
            *incarnation += 1;
        }
    }

    pub(crate) fn fail(&mut self, kind: FailureKind, detail: String) {
        let at = self.now;
        self.failure.get_or_insert(Failure { at, kind, detail });
    }

    /// Schedules the clients' wake-ups, and takes their first complaint.
    fn take_due(&mut self) {
        if self.load.due.is_empty() && self.load.failure.is_none() {
            // After most events.
            return;
        }
        for due in self.load.due.drain(..) {
            let event = Event::Client { client: due.client, serial: due.serial };
            self.queue.push(due.at, event);
        }
        if let Some(problem) = self.load.failure.take() {
            self.fail(FailureKind::Promise, problem);
        }
    }
}
