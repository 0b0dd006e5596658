//! One server node: its replicas of many partitions.

use std::fmt;

use orthodrome_core::id::NodeId;
use orthodrome_core::machine::{Cx, Input, Leftover, Machine, Setup, StateCopy};

use super::leader::Leader;
use super::message::{Msg, Record};
use super::{Locking, Timer};
use crate::hosting;

/// The server side: every role that one node plays.
#[derive(Debug)]
pub struct Server(hosting::Server<Leader>);

type Way<'a> = hosting::Way<'a, Leader>;

impl Machine<Locking> for Server {
    fn new(setup: Setup<Locking>, recovered: Vec<Record>, cx: &mut Cx<'_, Locking>) -> Self {
        let Setup { node, cluster, config, engine } = setup;
        let mut hosted = hosting::Server::new(node, cluster, config, engine, recovered, cx);
        hosted.settle(cx, deliver);
        Self(hosted)
    }

    fn step(&mut self, input: Input<Locking>, cx: &mut Cx<'_, Locking>) {
        match input {
            Input::Message { from, msg } => deliver(&mut self.0, from, msg, cx),
            Input::Timer(timer) => self.on_timer(timer, cx),
            Input::Durable(ticket) => self.0.on_durable(ticket, cx),
            Input::Admin(admin) => self.0.on_admin(admin, cx),
            Input::Begin(_) | Input::Read { .. } | Input::Decide { .. } | Input::Resolve { .. } => {
                unreachable!("callers talk to gateways, not to servers")
            }
        }
        self.0.settle(cx, deliver);
    }

    fn flush(&mut self, cx: &mut Cx<'_, Locking>) {
        self.0.flush(cx);
    }

    fn assert_invariants(&self) {
        self.0.assert_invariants();
    }

    fn leftovers(&self) -> Vec<Leftover> {
        self.0.leftovers()
    }

    fn copies(&self) -> Vec<StateCopy> {
        self.0.copies()
    }
}

/// A message, from another node or from this one.
fn deliver(server: &mut hosting::Server<Leader>, from: NodeId, msg: Msg, cx: &mut Way<'_>) {
    if let Some(id) = msg.partition() {
        server.on_message(id, from, msg, cx);
        return;
    }
    match msg {
        Msg::Replication { partition, message } => {
            server.on_log_message(partition, from, message, cx);
        }
        Msg::NotLeader { partition, leader, txn } => {
            server.on_not_leader(from, partition, leader, txn, cx);
        }
        Msg::Lock { .. }
        | Msg::Locked { .. }
        | Msg::Waiting { .. }
        | Msg::Wounded { .. }
        | Msg::KeepAlive { .. }
        | Msg::Release { .. }
        | Msg::Commit { .. }
        | Msg::Prepare { .. }
        | Msg::Vote { .. }
        | Msg::Decided { .. }
        | Msg::Decision { .. }
        | Msg::DecisionAck { .. }
        | Msg::QueryDecision { .. }
        | Msg::Resolve { .. }
        | Msg::ReadOnly { .. }
        | Msg::ReadOnlyResult { .. } => {
            unreachable!("answers to clients do not come to servers")
        }
    }
}

impl Server {
    fn on_timer(&mut self, timer: Timer, cx: &mut Way<'_>) {
        match timer {
            Timer::Replication(id, timer) => self.0.on_log_timer(id, timer, cx),
            Timer::Sweep(id) => self.0.with(id, cx, |p, world| p.on_sweep_timeout(world)),
            Timer::CommitWait(id) => {
                self.0.with(id, cx, |p, world| p.on_commit_wait_timeout(world));
            }
            Timer::Resend(_) | Timer::Heartbeat => unreachable!("a client's timer at a server"),
        }
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, partition) in self.0.partitions.values().enumerate() {
            let separator = if at == 0 { "" } else { " | " };
            write!(f, "{separator}{partition}")?;
            let state = &partition.state;
            if let Some(leader) = &partition.leader
                && !leader.sessions.is_empty()
            {
                write!(f, " open {:?}", leader.sessions.keys())?;
            }
            if !state.prepared.is_empty() {
                write!(f, " prepared {:?}", state.prepared.keys())?;
            }
            if !state.decided.is_empty() {
                write!(f, " decided {:?}", state.decided.keys())?;
            }
        }
        Ok(())
    }
}
