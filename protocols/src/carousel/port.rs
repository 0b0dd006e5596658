//! What Carousel uses of [`Cx`], without the name of the variant that runs: the two share every
//! message, record and handler, so that the handlers need not be generic.

use std::sync::Arc;

use orthodrome_core::id::{NodeId, Ticket, TxnId};
use orthodrome_core::machine::{Claim, Cx};
use orthodrome_core::rng::Rng;
use orthodrome_core::store::Memtable;
use orthodrome_core::time::{Clock, Time};
use orthodrome_core::txn::{Outcome, Reads};

use super::message::{Msg, Record};
use super::{Carousel, Note, Timer};

/// The methods of [`Cx`], by their names.
pub(super) trait Port {
    fn now(&self) -> Time;
    fn clock(&self) -> Clock;
    fn rng(&mut self) -> &mut Rng;
    fn send(&mut self, to: NodeId, msg: Msg);
    fn set_timer(&mut self, timer: Timer, at: Time);
    fn cancel_timer(&mut self, timer: Timer);
    fn persist(&mut self, record: Record) -> Ticket;
    fn checkpoint(&mut self, versions: Arc<Memtable>, records: Vec<Record>) -> Ticket;
    fn reads(&mut self, txn: TxnId, reads: Reads);
    fn finish(&mut self, txn: TxnId, outcome: Outcome, path: &'static str);
    fn note(&mut self, note: Note);
    fn claim(&mut self, claim: Claim);
}

impl<const FAST: bool> Port for Cx<'_, Carousel<FAST>> {
    fn now(&self) -> Time {
        Cx::now(self)
    }

    fn clock(&self) -> Clock {
        Cx::clock(self)
    }

    fn rng(&mut self) -> &mut Rng {
        Cx::rng(self)
    }

    fn send(&mut self, to: NodeId, msg: Msg) {
        Cx::send(self, to, msg);
    }

    fn set_timer(&mut self, timer: Timer, at: Time) {
        Cx::set_timer(self, timer, at);
    }

    fn cancel_timer(&mut self, timer: Timer) {
        Cx::cancel_timer(self, timer);
    }

    fn persist(&mut self, record: Record) -> Ticket {
        Cx::persist(self, record)
    }

    fn checkpoint(&mut self, versions: Arc<Memtable>, records: Vec<Record>) -> Ticket {
        Cx::checkpoint(self, versions, records)
    }

    fn reads(&mut self, txn: TxnId, reads: Reads) {
        Cx::reads(self, txn, reads);
    }

    fn finish(&mut self, txn: TxnId, outcome: Outcome, path: &'static str) {
        Cx::finish(self, txn, outcome, path);
    }

    fn note(&mut self, note: Note) {
        Cx::note(self, note);
    }

    fn claim(&mut self, claim: Claim) {
        Cx::claim(self, claim);
    }
}
