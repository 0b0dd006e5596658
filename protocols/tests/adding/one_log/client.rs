//! The gateway: reads, runs the transaction, and asks the leader to append it.

use std::fmt;
use std::sync::Arc;

use orthodrome_core::id::{NodeId, TxnId};
use orthodrome_core::machine::{Cx, Input, Leak, Machine, Message as _, Setup, UNKNOWABLE};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::session::is_below;
use orthodrome_core::time::Time;
use orthodrome_core::txn::{AbortReason, Decision, Key, Kind, Outcome, Read, Reads, Txn, Writes};
use orthodrome_protocols::routes::Routes;

use super::message::{Msg, Record, Request};
use super::{Config, GROUP, Note, OneLog, Timer};

type Context<'a> = Cx<'a, OneLog>;

/// The client side.
#[derive(Debug)]
pub struct Client {
    config: Arc<Config>,
    routes: Routes,
    open: OrdMap<TxnId, Open>,
}

/// A transaction under way.
#[derive(Debug)]
struct Open {
    txn: Txn,
    reads: Reads,
    /// What the leader was asked, and when; none while the caller thinks.
    asked: Option<(Msg, Time)>,
}

impl Machine<OneLog> for Client {
    fn new(setup: Setup<OneLog>, _: Vec<Record>, _: &mut Context<'_>) -> Self {
        let routes = Routes::new(setup.cluster);
        Self { config: setup.config, routes, open: OrdMap::new() }
    }

    fn step(&mut self, input: Input<OneLog>, cx: &mut Context<'_>) {
        match input {
            Input::Begin(txn) => self.on_begin(txn, cx),
            Input::Decide { txn, decision } => self.on_decide(txn, decision, cx),
            Input::Resolve { txn, reads, .. } => self.on_resolve(txn, reads, cx),
            Input::Message { from, msg } => self.on_message(from, msg, cx),
            Input::Timer(Timer::Resend(txn)) => self.on_resend_timeout(txn, cx),
            // Of a general transaction, which has ended: it was refused.
            Input::Read { .. } => {}
            Input::Timer(Timer::Log(..)) | Input::Durable(_) | Input::Admin(_) => {
                unreachable!("a server's input at a gateway")
            }
        }
    }

    fn flush(&mut self, _: &mut Context<'_>) {}

    fn assert_invariants(&self) {}

    fn leaks(&self) -> Vec<Leak> {
        vec![("open transactions", self.open.len())]
    }
}

impl Client {
    fn on_begin(&mut self, txn: Txn, cx: &mut Context<'_>) {
        let id = txn.id;
        if txn.kind == Kind::General {
            cx.finish(id, Outcome::Aborted(AbortReason::Invalid), "log");
            return;
        }
        if self.open.contains_key(&id) {
            return;
        }
        let keys = txn.reads.clone();
        self.open.insert(id, Open { txn, reads: Reads::new(), asked: None });
        if keys.is_empty() {
            self.execute(id, cx);
        } else {
            self.ask(Msg::Read { txn: id, keys }, cx);
        }
    }

    /// Asks the leader, and again until it answers.
    fn ask(&mut self, msg: Msg, cx: &mut Context<'_>) {
        let Some(open) = msg.txn().and_then(|txn| self.open.get_mut(&txn)) else { return };
        open.asked = Some((msg.clone(), cx.now()));
        cx.set_timer(Timer::Resend(open.txn.id), cx.now() + self.config.resend_after);
        cx.send(self.routes.leader(GROUP), msg);
    }

    fn on_values(&mut self, id: TxnId, reads: Option<Vec<(Key, Read)>>, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        if !matches!(open.asked, Some((Msg::Read { .. }, _))) {
            return;
        }
        let Some(reads) = reads else {
            self.finish(id, Outcome::Aborted(AbortReason::TooLarge), cx);
            return;
        };
        open.reads = reads.into_iter().collect();
        if is_below(&open.txn.floors, &open.reads) {
            // A leader that was deposed. The timer asks another one.
            cx.note(Note::BehindClient);
            return;
        }
        open.asked = None;
        cx.cancel_timer(Timer::Resend(id));
        self.execute(id, cx);
    }

    /// Everything is read.
    fn execute(&mut self, id: TxnId, cx: &mut Context<'_>) {
        let Some(open) = self.open.get(&id) else { return };
        match &open.txn.kind {
            Kind::Interactive => cx.reads(id, open.reads.clone()),
            Kind::ReadOnly | Kind::StaleReadOnly => self.commit(id, Writes::new(), cx),
            Kind::Procedure(ops) => match Txn::execute(ops, &open.reads) {
                Ok(writes) => self.commit(id, writes, cx),
                Err(reason) => self.finish(id, Outcome::Aborted(reason), cx),
            },
            Kind::General => unreachable!("{id} was refused"),
        }
    }

    fn commit(&mut self, id: TxnId, writes: Writes, cx: &mut Context<'_>) {
        let Some(open) = self.open.get(&id) else { return };
        let seen = open.reads.iter().map(|(key, read)| (key.clone(), read.version)).collect();
        let acknowledged_below = open.txn.acknowledged_below;
        let is_read_only = open.txn.is_read_only();
        let request = Request { seen, writes, is_read_only, acknowledged_below };
        self.ask(Msg::Commit { txn: id, asked: cx.now(), request }, cx);
    }

    fn on_decide(&mut self, id: TxnId, decision: Decision, cx: &mut Context<'_>) {
        if self.open.get(&id).is_none_or(|open| open.asked.is_some()) {
            return;
        }
        match decision {
            Decision::Commit(writes) => self.commit(id, writes, cx),
            Decision::Abort => self.finish(id, Outcome::Aborted(AbortReason::Client), cx),
        }
    }

    fn on_resolve(&mut self, txn: Txn, reads: Reads, cx: &mut Context<'_>) {
        let id = txn.id;
        if txn.is_read_only() {
            // It changes nothing, so it can be read again.
            self.open.remove(&id);
            self.on_begin(txn, cx);
            return;
        }
        let open = self.open.entry(id).or_insert(Open { txn, reads, asked: None });
        if !matches!(open.asked, Some((Msg::Commit { .. } | Msg::Resolve { .. }, _))) {
            self.ask(Msg::Resolve { txn: id, asked: cx.now() }, cx);
        }
    }

    fn on_message(&mut self, from: NodeId, msg: Msg, cx: &mut Context<'_>) {
        match msg {
            Msg::Values { txn, reads } => {
                self.routes.learn(GROUP, from, cx.now());
                self.on_values(txn, reads, cx);
            }
            Msg::Ended { txn, asked, outcome } => {
                self.routes.learn(GROUP, from, cx.now());
                self.on_ended(txn, asked, outcome, cx);
            }
            Msg::NotLeader { partition, leader, txn } => {
                let is_news = self.routes.redirect(partition, from, leader, cx.now());
                let asked = txn.and_then(|txn| self.open.get(&txn)?.asked.clone());
                if let Some((msg, _)) = asked.filter(|_| is_news) {
                    self.ask(msg, cx);
                }
            }
            Msg::Members { partition, since, voters } => {
                self.routes.learn_voters(partition, since, &voters);
            }
            Msg::Read { .. } | Msg::Commit { .. } | Msg::Resolve { .. } | Msg::Log { .. } => {
                unreachable!("{} is not for a gateway", msg.kind())
            }
        }
    }

    fn on_ended(&mut self, id: TxnId, asked: Time, outcome: Outcome, cx: &mut Context<'_>) {
        let Some(open) = self.open.get(&id) else { return };
        let is_told = match open.asked {
            Some((Msg::Commit { asked: last, .. }, _)) if last == asked => true,
            Some((Msg::Resolve { asked: last, .. }, _)) if last == asked => false,
            // An answer to an earlier request.
            Some(_) | None => return,
        };
        let is_committed = matches!(outcome, Outcome::Committed(_));
        if is_committed && is_told && open.txn.kind != Kind::Interactive {
            cx.reads(id, open.reads.clone());
        }
        self.finish(id, outcome, cx);
    }

    fn on_resend_timeout(&mut self, id: TxnId, cx: &mut Context<'_>) {
        let Some((msg, at)) = self.open.get(&id).and_then(|open| open.asked.clone()) else {
            return;
        };
        cx.note(Note::Resent);
        self.routes.suspect(GROUP, at, cx.now());
        self.ask(msg, cx);
    }

    fn finish(&mut self, id: TxnId, outcome: Outcome, cx: &mut Context<'_>) {
        cx.cancel_timer(Timer::Resend(id));
        if self.open.remove(&id).is_some() {
            let is_forgotten = outcome == Outcome::Unknown;
            cx.finish(id, outcome, if is_forgotten { UNKNOWABLE } else { "log" });
        }
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "open {:?}", self.open.keys())
    }
}
