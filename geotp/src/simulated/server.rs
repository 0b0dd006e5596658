//! One node with a source and the agent beside it.

use std::fmt;

use orthodrome_core::id::NodeId;
use orthodrome_core::machine::{Cx, Input, Leak, Machine, Setup};
use orthodrome_core::time::Time;
use orthodrome_core::txn::Key;

use super::{GeoTp, Msg, Record, Timer};
use crate::agent::Agent;
use crate::contract::{AgentEffect, AgentTimer, FromSource, Io, Kind, ToAgent};
use crate::source::{Answer, Desk, Model, Order, Source};

/// An agent and its source.
#[derive(Debug)]
pub struct Server {
    agent: Agent<Model>,
    source: Source,
}

type Context<'a> = Cx<'a, GeoTp>;

impl Machine<GeoTp> for Server {
    fn new(setup: Setup<GeoTp>, recovered: Vec<Record>, cx: &mut Context<'_>) -> Self {
        let Setup { node, config, engine, .. } = setup;
        let kind = config.middleware.sources.get(&node).copied().unwrap_or(Kind::MariaDb);
        let records = recovered.into_iter().filter_map(|record| match record {
            Record::Source(record) => Some(record),
            Record::Middleware(_) => None,
        });
        let start = cx.rng().next_u64();
        let source = Source::new(config.source.clone(), kind, start, engine, records.collect());
        let life = cx.rng().next_u64();
        let mut effects = Vec::new();
        let (now, clock) = (cx.now(), cx.clock().now);
        let mut io = Io { now, clock, rng: cx.rng(), effects: &mut effects };
        let agent = Agent::new(config.agent.clone(), life, &mut io);
        let mut server = Self { agent, source };
        let start = server.source.start();
        server.carry_out(effects, cx);
        server.tell_agent(FromSource::Up { start }, cx);
        server
    }

    fn step(&mut self, input: Input<GeoTp>, cx: &mut Context<'_>) {
        match input {
            Input::Message { from, msg } => self.on_message(from, msg, cx),
            Input::Timer(Timer::Agent(timer)) => self.on_agent_timeout(timer, cx),
            Input::Timer(Timer::Source(timer)) => {
                self.with_source(cx, |source, now, desk| source.on_timer(timer, now, desk));
            }
            Input::Durable(ticket) => {
                self.with_source(cx, |source, now, desk| source.on_durable(ticket, now, desk));
            }
            // A source has no replicas to move.
            Input::Admin(_) => {}
            Input::Timer(Timer::Middleware(_) | Timer::Ask(_) | Timer::Look(_))
            | Input::Begin(_)
            | Input::Read { .. }
            | Input::Decide { .. }
            | Input::Resolve { .. } => {
                unreachable!("only a middleware has that")
            }
        }
    }

    fn flush(&mut self, _: &mut Context<'_>) {}

    fn assert_invariants(&self) {
        self.agent.assert_invariants();
        self.source.assert_invariants();
    }

    fn leaks(&self) -> Vec<Leak> {
        [self.agent.leaks(), self.source.leaks()].concat()
    }
}

impl Server {
    fn on_message(&mut self, from: NodeId, msg: Msg, cx: &mut Context<'_>) {
        match msg {
            Msg::ToAgent(msg) => self.on_order(from, msg, cx),
            Msg::Peer(msg) => self.with_agent(cx, |agent, io| agent.on_peer(msg, io)),
            Msg::Look { txn, look, keys } => {
                let now = cx.now();
                let answer = |key: Key| Answer { read: self.source.shown(&key, now), key };
                let answers = keys.into_iter().map(answer).collect();
                cx.send(from, Msg::Seen { txn, look, answers });
            }
            Msg::FromAgent(_) | Msg::Ask { .. } | Msg::Told { .. } | Msg::Seen { .. } => {
                unreachable!("only a middleware is told that")
            }
        }
    }

    fn on_order(&mut self, from: NodeId, msg: ToAgent<Model>, cx: &mut Context<'_>) {
        self.with_agent(cx, |agent, io| agent.on_message(from, msg, io));
    }

    fn on_agent_timeout(&mut self, timer: AgentTimer, cx: &mut Context<'_>) {
        self.with_agent(cx, |agent, io| agent.on_timer(timer, io));
    }

    fn tell_agent(&mut self, news: FromSource<Model>, cx: &mut Context<'_>) {
        self.with_agent(cx, |agent, io| agent.on_source(news, io));
    }

    fn with_agent(
        &mut self,
        cx: &mut Context<'_>,
        act: impl FnOnce(&mut Agent<Model>, &mut Io<'_, AgentEffect<Model>>),
    ) {
        let mut effects = Vec::new();
        let (now, clock) = (cx.now(), cx.clock().now);
        let mut io = Io { now, clock, rng: cx.rng(), effects: &mut effects };
        act(&mut self.agent, &mut io);
        self.carry_out(effects, cx);
    }

    fn carry_out(&mut self, effects: Vec<AgentEffect<Model>>, cx: &mut Context<'_>) {
        for effect in effects {
            match effect {
                AgentEffect::Send { to, msg } => cx.send(to, Msg::FromAgent(msg)),
                AgentEffect::Peer { to, msg } => cx.send(to, Msg::Peer(msg)),
                AgentEffect::Source(order) => {
                    self.with_source(cx, |source, now, desk| source.step(order, now, desk));
                }
                AgentEffect::SetTimer(timer, at) => cx.set_timer(Timer::Agent(timer), at),
                AgentEffect::Note(note) => cx.note(note),
            }
        }
    }

    fn with_source(
        &mut self,
        cx: &mut Context<'_>,
        act: impl FnOnce(&mut Source, Time, &mut Desk),
    ) {
        let mut desk = Desk::default();
        act(&mut self.source, cx.now(), &mut desk);
        for order in desk.orders {
            match order {
                Order::Persist(record) => {
                    cx.persist(Record::Source(record));
                }
                Order::Checkpoint(versions, records) => {
                    cx.checkpoint(versions, records.into_iter().map(Record::Source).collect());
                }
                Order::SetTimer(timer, at) => cx.set_timer(Timer::Source(timer), at),
                Order::CancelTimer(timer) => cx.cancel_timer(Timer::Source(timer)),
                Order::Note(note) => cx.note(note),
            }
        }
        for answer in desk.answers {
            self.tell_agent(answer, cx);
        }
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let locks = self.source.to_string();
        write!(f, "{}", self.agent)?;
        if !locks.is_empty() {
            write!(f, " | {locks}")?;
        }
        Ok(())
    }
}
