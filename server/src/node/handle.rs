//! A running node, as its owner has it: its statistics, and how it ends.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use orthodrome_core::machine::Admin;
use tokio::sync::{oneshot, watch};
use tracing::warn;

use super::Shared;
use super::driver::Event;
use crate::gateway::{Backend, Gateway, Health, InFlight};
use crate::storage::{Tag, Writer};
use crate::transport::{LinkStatus, Transport};
use crate::wire::WireProtocol;

/// Time limit for handing leadership to another node, in addition to network delays.
const HAND_OVER_EXTRA: Duration = Duration::from_millis(500);
/// Interval at which a node that is shutting down checks whether it has handed over its
/// leaderships.
const HAND_OVER_LOOK: Duration = Duration::from_millis(10);

/// A running node. Dropping it ends the node at once, as a crash would, except that its data
/// directory may stay locked a moment longer. [`NodeHandle::kill`] waits for that.
#[derive(Debug)]
pub struct NodeHandle {
    pub(super) gateway: Gateway,
    pub(super) parts: Arc<dyn Parts>,
    pub(super) in_flight: Arc<InFlight>,
    pub(super) failure: watch::Receiver<Option<String>>,
    pub(super) threads: Vec<JoinHandle<()>>,
    pub(super) writer: Option<Writer>,
}

/// The part of the node that a handle needs, independent of the protocol.
pub(super) trait Parts: Send + Sync + std::fmt::Debug {
    fn stop_accepting(&self);
    /// Time limit for handing leadership to another node, in addition to network delays.
    fn hand_over_within(&self) -> Duration;
    /// Asks the server machine to hand over its leaderships, and returns the number of groups that
    /// it leads. None if it does not answer.
    fn hand_over(&self) -> Pin<Box<dyn Future<Output = Option<usize>> + Send + '_>>;
    fn close_inboxes(&self);
    fn end(&self);
    fn transport(&self) -> Option<&Transport>;
    fn describe(&self, tag: Tag, reply: oneshot::Sender<String>);
    fn machine_status(&self, tag: Tag) -> MachineStatus;
}

impl<P: WireProtocol> std::fmt::Debug for Shared<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node").field("me", &self.me).finish_non_exhaustive()
    }
}

impl<P: WireProtocol> Parts for Shared<P> {
    fn stop_accepting(&self) {
        let mut health = self.health();
        if *health == Health::Serving {
            *health = Health::Stopping;
        }
    }

    fn hand_over_within(&self) -> Duration {
        // Two round trips, and some time for a busy machine.
        self.map.topology.rtt_max() * 2 + HAND_OVER_EXTRA
    }

    fn hand_over(&self) -> Pin<Box<dyn Future<Output = Option<usize>> + Send + '_>> {
        Box::pin(async {
            let groups = Backend::groups(self).await.ok()?;
            let led = groups.iter().filter(|group| group.leader == Some(self.me.node));
            let successors = led.filter_map(|group| Some((group.partition, group.successor?)));
            let successors: Vec<_> = successors.collect();
            for &(partition, to) in &successors {
                // A group that is already being handed over refuses.
                drop(Backend::admin(self, Admin::TransferLeader { partition, to }));
            }
            Some(successors.len())
        })
    }

    fn close_inboxes(&self) {
        self.gateway.close();
        self.server.close();
    }

    fn end(&self) {
        Shared::end(self);
    }

    fn transport(&self) -> Option<&Transport> {
        self.transport.get()
    }

    fn describe(&self, tag: Tag, reply: oneshot::Sender<String>) {
        self.put(tag, Event::Describe(reply));
    }

    fn machine_status(&self, tag: Tag) -> MachineStatus {
        let counters = self.counters(tag);
        let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        MachineStatus {
            state: String::new(),
            waiting: self.inbox(tag).len(),
            inputs: get(&counters.inputs),
            timers: get(&counters.timers),
            batches: get(&counters.batches),
            records: get(&counters.records),
            checkpoints: get(&counters.checkpoints),
            notes: counters.notes.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }
}

/// Statistics of one machine since the node started.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MachineStatus {
    /// Its state in one line; empty if it does not answer.
    pub state: String,
    /// Number of queued inputs.
    pub waiting: usize,
    /// Number of inputs taken.
    pub inputs: u64,
    /// Number of timers fired.
    pub timers: u64,
    /// Number of turns.
    pub batches: u64,
    /// Number of records persisted.
    pub records: u64,
    /// Number of checkpoints.
    pub checkpoints: u64,
    /// Rare events by name.
    pub notes: BTreeMap<String, u64>,
}

/// Statistics of a node since it started.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Status {
    /// Its server machine.
    pub server: MachineStatus,
    /// Its gateway machine.
    pub gateway: MachineStatus,
    /// Its links.
    pub links: Vec<LinkStatus>,
    /// Amount of work queued for the disk.
    pub storage_backlog: usize,
}

impl NodeHandle {
    /// The node's gateway.
    #[must_use]
    pub fn gateway(&self) -> Gateway {
        self.gateway.clone()
    }

    /// Waits until the node fails because of an internal failure, and returns the reason.
    pub async fn failed(&self) -> String {
        let mut failure = self.failure.clone();
        let found = failure.wait_for(Option::is_some).await;
        match found.ok().and_then(|why| why.clone()) {
            Some(why) => why,
            None => std::future::pending().await,
        }
    }

    /// The node's statistics so far.
    pub async fn status(&self) -> Status {
        let mut status = Status {
            server: self.parts.machine_status(Tag::Server),
            gateway: self.parts.machine_status(Tag::Gateway),
            links: self.parts.transport().map(Transport::status).unwrap_or_default(),
            storage_backlog: self.writer.as_ref().map_or(0, Writer::backlog),
        };
        for (tag, machine) in
            [(Tag::Server, &mut status.server), (Tag::Gateway, &mut status.gateway)]
        {
            let (reply, state) = oneshot::channel();
            self.parts.describe(tag, reply);
            if let Ok(Ok(state)) = tokio::time::timeout(Duration::from_secs(1), state).await {
                machine.state = state;
            }
        }
        status
    }

    /// Shuts the node down in an orderly way: accepts no new transactions, finishes those in flight
    /// and hands over leaderships (both until `within` has passed at most), makes everything
    /// durable, and ends.
    pub async fn shutdown(mut self, within: Duration) {
        self.parts.stop_accepting();
        let deadline = tokio::time::Instant::now() + within;
        if tokio::time::timeout_at(deadline, self.in_flight.none()).await.is_err() {
            warn!("shutting down with pending transactions; their clients learn no outcome");
        }
        self.hand_over(deadline).await;
        self.parts.close_inboxes();
        let threads = std::mem::take(&mut self.threads);
        let writer = self.writer.take();
        let stopped = tokio::task::spawn_blocking(move || {
            join(threads);
            if let Some(writer) = writer {
                writer.stop();
            }
        });
        // A panic of these threads was reported when it happened.
        let _ = stopped.await;
        self.parts.end();
        if let Some(transport) = self.parts.transport() {
            transport.stop().await;
        }
    }

    /// Hands leaderships to other nodes, and waits until this node leads no group that another
    /// could lead. Gives up at `deadline`, or earlier if no node accepts.
    async fn hand_over(&self, deadline: tokio::time::Instant) {
        let until = tokio::time::Instant::now() + self.parts.hand_over_within();
        let until = until.min(deadline);
        let handed = async {
            while self.parts.hand_over().await.is_some_and(|left| left > 0) {
                tokio::time::sleep(HAND_OVER_LOOK).await;
            }
        };
        // The remaining groups will elect a leader.
        let _ = tokio::time::timeout_at(until, handed).await;
    }

    /// Ends the node at once, without writing or sending anything more, as `kill -9` would. Returns
    /// when its address and data directory are free.
    pub async fn kill(mut self) {
        self.parts.end();
        let threads = std::mem::take(&mut self.threads);
        let writer = self.writer.take();
        let ended = tokio::task::spawn_blocking(move || {
            drop(writer);
            join(threads);
        });
        let _ = ended.await;
        if let Some(transport) = self.parts.transport() {
            transport.stop().await;
        }
    }
}

impl Drop for NodeHandle {
    fn drop(&mut self) {
        self.parts.end();
    }
}

fn join(threads: Vec<JoinHandle<()>>) {
    for thread in threads {
        let _ = thread.join();
    }
}
