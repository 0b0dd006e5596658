//! One server node: its replicas of many partitions.

use std::fmt;

use orthodrome_core::id::NodeId;
use orthodrome_core::machine::{Cx, Input, Leftover, Machine, Setup, StateCopy};

use super::leader::{Leader, Way};
use super::message::{Msg, Record};
use super::state::State;
use super::{Carousel, Timer};
use crate::hosting;

/// The server side of Carousel: every role that one node plays.
#[derive(Debug)]
pub struct Server(hosting::Server<Leader>);

impl Machine<Carousel> for Server {
    fn new(setup: Setup<Carousel>, recovered: Vec<Record>, cx: &mut Cx<'_, Carousel>) -> Self {
        let Setup { node, cluster, config, engine } = setup;
        let mut hosted = hosting::Server::new(node, cluster, config, engine, recovered, cx);
        hosted.settle(cx, deliver);
        Self(hosted)
    }

    fn step(&mut self, input: Input<Carousel>, cx: &mut Cx<'_, Carousel>) {
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

    fn flush(&mut self, cx: &mut Cx<'_, Carousel>) {
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
        Msg::ReadResult { .. }
        | Msg::FollowerReadResult { .. }
        | Msg::Decided { .. }
        | Msg::FastDecided { .. }
        | Msg::ReadOnlyResult { .. }
        | Msg::ReadAndPrepare { .. }
        | Msg::FastPrepare { .. }
        | Msg::FastPrepareResult { .. }
        | Msg::CollectPending { .. }
        | Msg::PendingList { .. }
        | Msg::QueryPending { .. }
        | Msg::CoordinatorPrepare { .. }
        | Msg::Commit { .. }
        | Msg::Abort { .. }
        | Msg::Heartbeat { .. }
        | Msg::Resolve { .. }
        | Msg::PrepareResult { .. }
        | Msg::Writeback { .. }
        | Msg::WritebackAck { .. }
        | Msg::QueryPrepare { .. }
        | Msg::QueryDecision { .. }
        | Msg::MayForget { .. }
        | Msg::Forget { .. }
        | Msg::ReadOnly { .. } => {
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
            let State { prepared, coordinated, .. } = &partition.state;
            let separator = if at == 0 { "" } else { " | " };
            write!(f, "{separator}{partition}")?;
            if !prepared.is_empty() {
                write!(f, " prepared {:?}", prepared.keys())?;
            }
            if !coordinated.is_empty() {
                write!(f, " coordinated {:?}", coordinated.keys())?;
            }
            if partition.own.list.len() > 0 {
                let listed: Vec<_> = partition.own.list.txns().collect();
                write!(f, " listed {listed:?}")?;
            }
        }
        Ok(())
    }
}
