//! Nodes: their processes and disks, and how they start, pause and crash.

use std::collections::VecDeque;
use std::sync::Arc;

use orthodrome_core::cluster::Role;
use orthodrome_core::host::Host;
use orthodrome_core::id::NodeId;
use orthodrome_core::machine::{Input, Protocol, Setup};
use orthodrome_core::rng::Rng;
use orthodrome_core::time::Time;
use orthodrome_core::trace::Event as TraceEvent;

use super::{Event, Options, Simulation};
use crate::clock::NodeClock;
use crate::cpu::{Cpu, Tally};
use crate::disk::{Disk, DiskFailure};
use crate::promise::Beyond;

#[derive(Debug)]
pub(crate) enum Process<P: Protocol> {
    Server(Box<Host<P, P::Server>>),
    Gateway(Box<Host<P, P::Client>>),
    Down,
}

/// Calls a method of the running host; `$down` if there is none.
macro_rules! on_host {
    ($process:expr, $host:ident => $call:expr, $down:expr) => {
        match $process {
            Process::Server($host) => $call,
            Process::Gateway($host) => $call,
            Process::Down => $down,
        }
    };
}

pub(super) use on_host;

#[derive(Debug)]
pub(crate) struct Node<P: Protocol> {
    pub(crate) id: NodeId,
    pub(crate) role: Role,
    pub(crate) process: Process<P>,
    pub(crate) disk: Disk<P>,
    pub(crate) clock: NodeClock,
    pub(crate) cpu: Cpu,
    /// The work of its machine's workers.
    pub(super) work: Arc<Tally>,
    /// The current wake-up; others are outdated.
    pub(super) wake: Option<Time>,
    /// The number of faults that keep the node down.
    pub(crate) held_down: u32,
    /// The number of faults that keep the node paused.
    pub(crate) paused: u32,
    /// Events that arrived while the node was paused.
    pub(super) backlog: VecDeque<Event<P>>,
    /// True if a fault of the disk stopped the node and is not repaired yet.
    pub(crate) disk_stopped: bool,
}

impl<P: Protocol> Node<P> {
    /// A node that has not started.
    pub(super) fn new(id: NodeId, role: Role, options: &Options) -> Self {
        let mut rng = Rng::stream(options.seed, "clock", u64::from(id.0));
        Self {
            id,
            role,
            process: Process::Down,
            disk: Disk::new(id, options.disk),
            clock: NodeClock::draw(&options.clock, &mut rng),
            cpu: Cpu::new(options.cpu),
            work: Arc::default(),
            wake: None,
            held_down: 0,
            paused: 0,
            backlog: VecDeque::new(),
            disk_stopped: false,
        }
    }
}

impl<P: Protocol> Simulation<P> {
    /// Starts every node that is down, unless a fault keeps it down.
    pub fn start_nodes(&mut self) {
        for index in 0..self.nodes.len() {
            self.start_node(index as u32);
        }
    }

    /// Starts a node from its disk, unless it runs, a fault keeps it down, or it refuses its disk.
    pub(crate) fn start_node(&mut self, index: u32) {
        let now = self.env.now;
        let incarnation = self.env.incarnation(index);
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
                self.env.log(index, TraceEvent::Fault, None, None, None, "refuse", || {
                    refusal.to_string()
                });
                return;
            }
        };
        let (engine, workers) = (Box::new(node.disk.engine()), node.work.clone());
        let is_replacement = node.disk.is_replacement();
        let setup = Setup { node: node.id, cluster, config, engine, workers, is_replacement };
        let clock = node.clock.read(now);
        let stream = (u64::from(incarnation) << 32) | u64::from(node.id.0);
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
        if let Some(up) = self.env.up.get_mut(index as usize) {
            *up = true;
        }
        self.env.log(index, TraceEvent::Fault, None, None, None, "start", String::new);
        self.settle_input(index, 0);
    }

    /// Resumes a paused node: first it processes what arrived meanwhile, then its timers.
    pub(crate) fn resume(&mut self, index: u32) {
        let now = self.env.now;
        let node = self.node(index);
        if node.paused > 0 {
            return;
        }
        let backlog = std::mem::take(&mut node.backlog);
        node.wake = None;
        for event in backlog {
            self.env.queue.push(now, event);
        }
        self.rearm(index);
    }

    /// Stops a node like a power cut.
    pub(crate) fn crash(&mut self, index: u32, torn: bool) {
        let Self { nodes, env, .. } = self;
        let Some(node) = nodes.get_mut(index as usize) else { return };
        if matches!(node.process, Process::Down) {
            return;
        }
        node.process = Process::Down;
        node.wake = None;
        node.backlog.clear();
        let lost = node.disk.crash(torn, &mut env.disk_rng);
        node.cpu.reset(env.now);
        let role = node.role;
        env.log(index, TraceEvent::Fault, None, None, None, "crash", String::new);
        env.set_down(index);
        for flight in env.network.crash(env.now, index) {
            env.lose(&flight);
        }
        if role == Role::Gateway {
            env.load.on_gateway_crash(env.now, index);
        }
        self.lose_writes(index, lost, "in a crash, because its disk had lied");
    }

    /// Records that a node's disk lost writes that it had reported as durable, if `lost` is not
    /// zero.
    pub(crate) fn lose_writes(&mut self, index: u32, lost: u64, how: &str) {
        if lost == 0 {
            return;
        }
        let (at, node) = (self.env.now, self.env.id(index));
        let detail = format!("{node} lost {lost} durable writes {how}");
        self.env.log(index, TraceEvent::Fault, None, None, None, "lost-writes", || detail.clone());
        *self.injected.entry("lost-writes").or_default() += 1;
        self.env.beyond.get_or_insert(Beyond { at, detail });
    }

    pub(super) fn flushed(&mut self, index: u32, incarnation: u32) {
        if self.env.incarnation(index) != incarnation {
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

    pub(super) fn start_flush(&mut self, index: u32) {
        if self.env.manual.is_some() {
            return;
        }
        let Self { nodes, env, .. } = self;
        let Some(node) = nodes.get_mut(index as usize) else { return };
        if let Some(done) = node.disk.start_flush(env.now, &mut env.disk_rng) {
            let incarnation = env.incarnation(index);
            env.queue.push(done, Event::Flushed { node: index, incarnation });
        }
    }

    fn stop_by_disk(&mut self, index: u32) {
        let node = self.node(index);
        node.disk_stopped = true;
        node.held_down += 1;
        self.crash(index, false);
    }

    /// A machine's one-line state; `down` if it does not run.
    #[must_use]
    pub fn state_of(&self, node: NodeId) -> String {
        let found = self.nodes.iter().find(|candidate| candidate.id == node);
        let Some(found) = found else { return "not in the cluster".into() };
        on_host!(&found.process, host => host.machine().to_string(), "down".into())
    }

    /// A machine's running timers by their `Debug` form, earliest first.
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
}
