//! A machine's way out, without the name of its protocol.

use std::sync::Arc;

use orthodrome_core::id::{NodeId, Ticket, TxnId};
use orthodrome_core::machine::{Claim, Cx, Protocol};
use orthodrome_core::rng::Rng;
use orthodrome_core::store::Memtable;
use orthodrome_core::time::{Clock, Time};
use orthodrome_core::txn::{Outcome, Reads};

use super::{Record, Role};

/// A machine's door to the world, without the name of its protocol: several names (variants of one
/// paper) share one machine.
pub trait Outside {
    /// As [`Protocol::Msg`].
    type Msg;
    /// As [`Protocol::Timer`].
    type Timer;
    /// As [`Protocol::Record`].
    type Record;
    /// As [`Protocol::Note`].
    type Note;

    fn now(&self) -> Time;
    fn clock(&self) -> Clock;
    fn rng(&mut self) -> &mut Rng;
    fn send(&mut self, to: NodeId, msg: Self::Msg);
    fn set_timer(&mut self, timer: Self::Timer, at: Time);
    fn cancel_timer(&mut self, timer: Self::Timer);
    fn persist(&mut self, record: Self::Record) -> Ticket;
    fn checkpoint(&mut self, versions: Arc<Memtable>, records: Vec<Self::Record>) -> Ticket;
    fn reads(&mut self, txn: TxnId, reads: Reads);
    fn finish(&mut self, txn: TxnId, outcome: Outcome, path: &'static str);
    fn note(&mut self, note: Self::Note);
    fn claim(&mut self, claim: Claim);
}

impl<P: Protocol> Outside for Cx<'_, P> {
    type Msg = P::Msg;
    type Timer = P::Timer;
    type Record = P::Record;
    type Note = P::Note;

    fn now(&self) -> Time {
        Cx::now(self)
    }
    fn clock(&self) -> Clock {
        Cx::clock(self)
    }
    fn rng(&mut self) -> &mut Rng {
        Cx::rng(self)
    }
    fn send(&mut self, to: NodeId, msg: P::Msg) {
        Cx::send(self, to, msg);
    }
    fn set_timer(&mut self, timer: P::Timer, at: Time) {
        Cx::set_timer(self, timer, at);
    }
    fn cancel_timer(&mut self, timer: P::Timer) {
        Cx::cancel_timer(self, timer);
    }
    fn persist(&mut self, record: P::Record) -> Ticket {
        Cx::persist(self, record)
    }
    fn checkpoint(&mut self, versions: Arc<Memtable>, records: Vec<P::Record>) -> Ticket {
        Cx::checkpoint(self, versions, records)
    }
    fn reads(&mut self, txn: TxnId, reads: Reads) {
        Cx::reads(self, txn, reads);
    }
    fn finish(&mut self, txn: TxnId, outcome: Outcome, path: &'static str) {
        Cx::finish(self, txn, outcome, path);
    }
    fn note(&mut self, note: P::Note) {
        Cx::note(self, note);
    }
    fn claim(&mut self, claim: Claim) {
        Cx::claim(self, claim);
    }
}

/// The door of a machine that hosts partitions in the role `R`.
pub type Way<'a, R> = dyn Outside<
        Msg = <R as Role>::Msg,
        Timer = <R as Role>::Timer,
        Record = RecordOf<R>,
        Note = <R as Role>::Note,
    > + 'a;

/// What a node that hosts partitions in the role `R` remembers.
pub type RecordOf<R> = Record<<R as Role>::Log, <R as Role>::State, <R as Role>::OwnRecord>;
