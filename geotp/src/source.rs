//! A data source as the simulator has it: strict two-phase locking on rows, with the behaviours
//! that were measured of PostgreSQL 15 and MariaDB 10.11 (`protocol-pitfalls` §7) where they matter
//! to what is built on top.
//!
//! - Locks are held until the transaction has ended. Waiters are served in the order in which they
//!   came; who waits in a cycle is ended as the victim of a deadlock, and who waits too long by a
//!   time-out.
//! - A prepared branch is durable. After a crash, PostgreSQL has all its locks again, MariaDB those
//!   of rows that it modified; and MariaDB has forgotten branches that only read (G3, G4).
//! - Every start has a number of its own.
//!
//! Predicates are not modelled: a statement names its rows.

mod locks;
mod types;

use std::collections::VecDeque;
use std::fmt;

use orthodrome_core::id::{PartitionId, Ticket, TxnId};
use orthodrome_core::machine::Leak;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::store::{StateEngine, Store};
use orthodrome_core::time::{Time, Timestamp};
use orthodrome_core::txn::{Key, Read, Reads, Txn, Version, Writes};

use self::locks::Lock;
use self::types::Mode;
pub use self::types::{
    Action, Answer, Config, Desk, Model, Mutations, Order, Record, Statement, Timer,
};
use crate::contract::{Failure, FromSource, Kind, Mark, Reason, Then, ToSource, Wait, Xid};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Idle,
    /// It runs the statement of that index.
    Running(u32),
    Preparing,
    Prepared,
    /// Prepared, or not, and on its way to commit.
    Committing(Timestamp),
}

#[derive(Clone, Debug)]
struct Session {
    txn: TxnId,
    state: State,
    statements: Vec<Statement>,
    answers: Vec<Answer>,
    then: Then,
    held: OrdMap<Key, Mode>,
    /// The lock that it waits for.
    wanted: Option<(Key, Mode)>,
    writes: Writes,
    floor: Timestamp,
    is_prepared: bool,
    /// Its savepoints: what it had written, and which locks it had.
    marks: Vec<(u32, Writes, OrdMap<Key, Mode>)>,
    /// PostgreSQL: a statement failed, and nothing runs before it has gone back to a savepoint.
    is_failed: bool,
}

/// A modelled source.
#[derive(Debug)]
pub struct Source {
    config: Config,
    kind: Kind,
    start: u64,
    data: Store,
    locks: OrdMap<Key, Lock>,
    sessions: OrdMap<Xid, Session>,
    /// The branches that change state when a ticket is durable.
    pending: OrdMap<Ticket, Xid>,
    ticket: Ticket,
    records: u32,
    checkpoint: Option<Ticket>,
    /// Whether the agent looks at the waits, and its last report.
    is_watched: bool,
    told: Vec<Wait>,
    /// What was replaced in the last while, and when.
    past: VecDeque<(Time, Key, Read)>,
    now: Time,
}

/// Maximum number of replaced versions that reads without locks may show.
const PAST_MAX: usize = 10_000;

/// All rows are one table.
const TABLE: PartitionId = PartitionId(0);

impl Source {
    /// Starts, or starts again, with what survived. `start` is a number of its own.
    #[must_use]
    pub fn new(
        config: Config,
        kind: Kind,
        start: u64,
        engine: Box<dyn StateEngine>,
        recovered: Vec<Record>,
    ) -> Self {
        let mut source = Self {
            config,
            kind,
            start,
            data: Store::new(engine),
            locks: OrdMap::new(),
            sessions: OrdMap::new(),
            pending: OrdMap::new(),
            ticket: Ticket(0),
            records: 0,
            checkpoint: None,
            is_watched: false,
            told: Vec::new(),
            past: VecDeque::new(),
            now: Time::ZERO,
        };
        for record in recovered {
            source.replay(record);
        }
        let prepared: Vec<Xid> = source.sessions.keys().copied().collect();
        for xid in prepared {
            let Some(session) = source.sessions.get(&xid) else { continue };
            for (key, mode) in session.held.clone() {
                source.locks.entry(key).or_default().holders.insert(xid, mode);
            }
        }
        source
    }

    fn replay(&mut self, record: Record) {
        match record {
            Record::Prepared { xid, txn, writes, reads, floor } => {
                let shared = reads.into_iter().map(|key| (key, Mode::Shared));
                let exclusive = writes.keys().map(|key| (key.clone(), Mode::Exclusive));
                let held = match self.kind {
                    Kind::Postgres => shared.chain(exclusive).collect(),
                    Kind::MariaDb => exclusive.collect(),
                };
                let session = Session {
                    state: State::Prepared,
                    held,
                    writes,
                    floor,
                    is_prepared: true,
                    ..Session::new(txn)
                };
                self.sessions.insert(xid, session);
            }
            Record::Committed { xid, at } => {
                if let Some(session) = self.sessions.remove(&xid) {
                    self.apply(session.txn, session.writes, at);
                }
            }
            Record::RolledBack { xid } => drop(self.sessions.remove(&xid)),
            Record::OnePhase { txn, writes, at } => self.apply(txn, writes, at),
        }
    }

    fn apply(&mut self, writer: TxnId, writes: Writes, at: Timestamp) {
        for (key, value) in writes {
            if !self.config.lag.is_zero() {
                self.past.push_back((self.now, key.clone(), self.data.read(TABLE, &key)));
            }
            self.data.put(TABLE, key, Version { timestamp: at, writer }, value);
        }
        // No transaction reads old versions. A row that is inserted again gets a later version than
        // its deletion.
        self.data.collect_values_below(TABLE, at);
        let (now, lag) = (self.now, self.config.lag);
        let is_over = |(then, ..): &(Time, Key, Read)| now.since(*then) > lag;
        while self.past.len() > PAST_MAX || self.past.front().is_some_and(is_over) {
            self.past.pop_front();
        }
    }

    /// A committed value of a row, without locks: what a replica shows that lags behind.
    #[must_use]
    pub fn shown(&self, key: &Key, now: Time) -> Read {
        let replaced = |(then, other, _): &&(Time, Key, Read)| {
            other == key && now.since(*then) < self.config.lag
        };
        let before = self.past.iter().find(replaced).map(|(_, _, read)| read.clone());
        before.unwrap_or_else(|| self.data.read(TABLE, key))
    }

    /// The value that it reports about its start.
    #[must_use]
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Processes a command of the agent.
    pub fn step(&mut self, order: ToSource<Model>, now: Time, desk: &mut Desk) {
        self.now = now;
        match order {
            ToSource::Run { xid, begin, marks, statements, then, wrote: _ } => {
                if begin.is_some() {
                    let txn = statements.first().map(|statement| statement.txn).unwrap_or_default();
                    self.sessions.entry(xid).or_insert_with(|| Session::new(txn));
                }
                for mark in marks {
                    self.mark(xid, mark, now, desk);
                }
                let Some(session) = self.sessions.get_mut(&xid) else {
                    desk.answers.push(FromSource::SessionLost { xid });
                    return;
                };
                assert!(!session.is_failed, "{xid} goes on after a failure without going back");
                (session.statements, session.then) = (statements, then);
                session.answers.clear();
                session.state = State::Running(0);
                self.go_on(xid, now, desk);
            }
            ToSource::Prepare { xid, .. } => self.prepare(xid, desk),
            ToSource::CommitPrepared { xid, at } => self.commit_prepared(xid, at, desk),
            ToSource::CommitOnePhase { xid, at } => self.commit_one_phase(xid, at, desk),
            ToSource::Rollback { xid } => self.roll_back(xid, now, desk),
            // In simulations no client cancels a commit.
            ToSource::Interrupt { .. } => {}
            ToSource::List => {
                let is_listed = |session: &Session| session.is_prepared;
                let prepared = self
                    .sessions
                    .iter()
                    .filter(|(_, session)| is_listed(session))
                    .map(|(&xid, _)| xid)
                    .collect();
                desk.answers.push(FromSource::Listed { prepared });
            }
        }
    }

    /// Does something with a savepoint.
    fn mark(&mut self, xid: Xid, mark: Mark, now: Time, desk: &mut Desk) {
        let Some(session) = self.sessions.get_mut(&xid) else { return };
        let place = |wanted: u32| session.marks.iter().position(|(number, ..)| *number == wanted);
        match mark {
            Mark::Set(number) => {
                session.marks.push((number, session.writes.clone(), session.held.clone()));
            }
            Mark::Release(number) => {
                let place = place(number);
                assert!(place.is_some(), "{xid} has no savepoint {number} to release");
                session.marks.truncate(place.unwrap_or_default());
            }
            Mark::Back(number) => {
                let place = place(number);
                assert!(place.is_some(), "{xid} has no savepoint {number} to go back to");
                session.marks.truncate(place.unwrap_or_default() + 1);
                session.is_failed = false;
                let Some((_, writes, held)) = session.marks.last().cloned() else { return };
                session.writes = writes;
                if self.config.mutations.unlocks_going_back {
                    let since: Vec<Key> = session
                        .held
                        .keys()
                        .filter(|key| !held.contains_key(*key))
                        .cloned()
                        .collect();
                    session.held.retain(|key, _| held.contains_key(key));
                    self.release(xid, &since, now, desk);
                }
            }
        }
    }

    /// Runs the session's statements until one waits, fails, or all are done.
    fn go_on(&mut self, xid: Xid, now: Time, desk: &mut Desk) {
        loop {
            let Some(session) = self.sessions.get(&xid) else { return };
            let State::Running(at) = session.state else { return };
            let Some(statement) = session.statements.get(at as usize).cloned() else {
                self.done(xid, desk);
                return;
            };
            let Some(key) = statement.action.key().cloned() else {
                self.fail(xid, Reason::Statement, desk);
                return;
            };
            let mode = statement.action.mode();
            let is_plain = self.config.mutations.plain_reads
                && self.kind == Kind::Postgres
                && mode == Mode::Shared;
            if !is_plain && !self.acquire(xid, &key, mode) {
                self.wait(xid, key, mode, now, desk);
                return;
            }
            if let Err(reason) = self.execute(xid, &key, &statement.action) {
                self.fail(xid, reason, desk);
                return;
            }
            if let Some(session) = self.sessions.get_mut(&xid) {
                session.state = State::Running(at + 1);
            }
        }
    }

    /// Carries out one statement under its lock.
    fn execute(&mut self, xid: Xid, key: &Key, action: &Action) -> Result<(), Reason> {
        let mutations = self.config.mutations;
        let read = self.data.read(TABLE, key);
        let Some(session) = self.sessions.get_mut(&xid) else { return Ok(()) };
        session.floor = session.floor.max(read.version.timestamp);
        match action {
            Action::Read { .. } => {}
            Action::Expect { read: expected, .. } => {
                if read != *expected && !mutations.unchecked_reads {
                    return Err(Reason::Serialization);
                }
            }
            Action::Counted { value, existed, .. } => {
                let own = session.writes.get(key).map(Option::is_some);
                let exists = own.unwrap_or(read.value.is_some());
                if exists != *existed && !mutations.unchecked_counts {
                    return Err(Reason::Serialization);
                }
                // An update of a row that is gone meets none.
                if exists || !existed {
                    session.writes.insert(key.clone(), value.clone());
                }
            }
            Action::Write { value, .. } => drop(session.writes.insert(key.clone(), value.clone())),
            Action::Apply(op) => {
                let mut current = read.clone();
                if let Some(own) = session.writes.get(key) {
                    current.value.clone_from(own);
                }
                let reads = Reads::from([(key.clone(), current)]);
                let writes = Txn::execute(std::slice::from_ref(op), &reads)
                    .map_err(|_| Reason::Statement)?;
                session.writes.extend(writes);
            }
        }
        session.answers.push(Answer { key: key.clone(), read });
        Ok(())
    }

    fn done(&mut self, xid: Xid, desk: &mut Desk) {
        let Some(session) = self.sessions.get_mut(&xid) else { return };
        session.state = State::Idle;
        session.statements.clear();
        let answers = std::mem::take(&mut session.answers);
        let then = session.then;
        desk.answers.push(FromSource::Ran { xid, answers });
        match then {
            Then::Wait => {}
            Then::Prepare => self.prepare(xid, desk),
            Then::Commit => self.commit_one_phase(xid, Timestamp::ZERO, desk),
        }
    }

    fn fail(&mut self, xid: Xid, reason: Reason, desk: &mut Desk) {
        let now = self.now;
        let Some(session) = self.sessions.get_mut(&xid) else { return };
        let State::Running(statement) = session.state else { return };
        // Its locks, and its position in a queue, are released when it is rolled back, unless it
        // continues.
        session.state = State::Idle;
        let failure: Failure<Model> = reason.into();
        let goes_on = match self.kind {
            Kind::Postgres => !session.marks.is_empty(),
            Kind::MariaDb => reason == Reason::Statement,
        };
        session.is_failed = goes_on && self.kind == Kind::Postgres;
        if goes_on && let Some((key, _)) = session.wanted.take() {
            if let Some(lock) = self.locks.get_mut(&key) {
                lock.queue.retain(|(other, _)| *other != xid);
            }
            self.serve(&key, now, desk);
        }
        desk.answers.push(FromSource::RunFailed { xid, statement, failure, goes_on });
    }

    fn prepare(&mut self, xid: Xid, desk: &mut Desk) {
        let Some(session) = self.sessions.get_mut(&xid) else {
            let failure = Reason::Unprepared.into();
            desk.answers.push(FromSource::Refused { xid, failure });
            return;
        };
        session.is_prepared = true;
        if self.kind == Kind::MariaDb && session.writes.is_empty() {
            // No part of it is written to the disk (G4).
            session.state = State::Prepared;
            let floor = session.floor;
            self.drop_read_locks(xid, desk);
            desk.answers.push(FromSource::Prepared { xid, floor });
            return;
        }
        session.state = State::Preparing;
        let shared = session.held.iter().filter(|(_, mode)| **mode == Mode::Shared);
        let record = Record::Prepared {
            xid,
            txn: session.txn,
            writes: session.writes.clone(),
            reads: shared.map(|(key, _)| key.clone()).collect(),
            floor: session.floor,
        };
        self.persist(Some(xid), record, desk);
    }

    fn drop_read_locks(&mut self, xid: Xid, desk: &mut Desk) {
        if !self.config.mutations.drops_read_locks || self.kind != Kind::MariaDb {
            return;
        }
        let Some(session) = self.sessions.get_mut(&xid) else { return };
        let shared: Vec<Key> = session
            .held
            .iter()
            .filter(|(_, mode)| **mode == Mode::Shared)
            .map(|(key, _)| key.clone())
            .collect();
        session.held.retain(|_, mode| *mode != Mode::Shared);
        self.release(xid, &shared, self.now, desk);
    }

    fn commit_prepared(&mut self, xid: Xid, at: Timestamp, desk: &mut Desk) {
        let Some(session) = self.sessions.get_mut(&xid) else {
            desk.answers.push(FromSource::Gone { xid });
            return;
        };
        if session.state == State::Prepared {
            session.state = State::Committing(at);
            self.persist(Some(xid), Record::Committed { xid, at }, desk);
        }
    }

    fn commit_one_phase(&mut self, xid: Xid, at: Timestamp, desk: &mut Desk) {
        let Some(session) = self.sessions.get_mut(&xid) else {
            desk.answers.push(FromSource::SessionLost { xid });
            return;
        };
        let at = at.max(session.floor.next());
        session.state = State::Committing(at);
        let (txn, writes) = (session.txn, session.writes.clone());
        if writes.is_empty() {
            self.committed(xid, at, self.now, desk);
        } else {
            self.persist(Some(xid), Record::OnePhase { txn, writes, at }, desk);
        }
    }

    fn committed(&mut self, xid: Xid, at: Timestamp, now: Time, desk: &mut Desk) {
        let Some(session) = self.sessions.remove(&xid) else { return };
        self.apply(session.txn, session.writes, at);
        desk.answers.push(FromSource::Committed { xid, at });
        let held: Vec<Key> = session.held.into_keys().collect();
        self.release(xid, &held, now, desk);
    }

    fn roll_back(&mut self, xid: Xid, now: Time, desk: &mut Desk) {
        let Some(session) = self.sessions.get(&xid) else {
            desk.answers.push(FromSource::RolledBack { xid });
            return;
        };
        if matches!(session.state, State::Committing(_)) {
            return;
        }
        let Some(session) = self.sessions.remove(&xid) else { return };
        if session.is_prepared {
            self.persist(None, Record::RolledBack { xid }, desk);
        }
        desk.answers.push(FromSource::RolledBack { xid });
        desk.orders.push(Order::CancelTimer(Timer::Lock(xid)));
        desk.orders.push(Order::CancelTimer(Timer::Deadlock(xid)));
        let wanted = session.wanted.map(|(key, _)| key);
        let held: Vec<Key> = session.held.into_keys().chain(wanted).collect();
        self.release(xid, &held, now, desk);
    }

    fn persist(&mut self, xid: Option<Xid>, record: Record, desk: &mut Desk) {
        self.ticket.0 += 1;
        self.records += 1;
        self.pending.extend(xid.map(|xid| (self.ticket, xid)));
        desk.orders.push(Order::Persist(record));
    }

    /// Everything up to this ticket is durable.
    pub fn on_durable(&mut self, ticket: Ticket, now: Time, desk: &mut Desk) {
        self.now = now;
        let later = self.pending.split_off(&Ticket(ticket.0 + 1));
        for (_, xid) in std::mem::replace(&mut self.pending, later) {
            let Some(session) = self.sessions.get_mut(&xid) else { continue };
            match session.state {
                State::Preparing => {
                    session.state = State::Prepared;
                    let floor = session.floor;
                    desk.answers.push(FromSource::Prepared { xid, floor });
                    self.drop_read_locks(xid, desk);
                }
                State::Committing(at) => self.committed(xid, at, now, desk),
                State::Idle | State::Running(_) | State::Prepared => {}
            }
        }
        if self.checkpoint.is_some_and(|checkpoint| checkpoint <= ticket) {
            self.checkpoint = None;
            self.data.thaw();
        }
        if self.records >= self.config.checkpoint_records && self.checkpoint.is_none() {
            self.take_checkpoint(desk);
        }
    }

    fn take_checkpoint(&mut self, desk: &mut Desk) {
        let mut records = Vec::new();
        for (&xid, session) in &self.sessions {
            let Session { txn, writes, floor, .. } = session.clone();
            let reads = session.held.iter().filter(|(_, mode)| **mode == Mode::Shared);
            let reads = reads.map(|(key, _)| key.clone()).collect();
            let is_kept = !(self.kind == Kind::MariaDb && writes.is_empty());
            if session.is_prepared && is_kept {
                records.push(Record::Prepared { xid, txn, writes: writes.clone(), reads, floor });
            }
            if let State::Committing(at) = session.state {
                records.push(if session.is_prepared {
                    Record::Committed { xid, at }
                } else {
                    Record::OnePhase { txn, writes, at }
                });
            }
        }
        self.ticket.0 += 1;
        self.records = 0;
        self.checkpoint = Some(self.ticket);
        desk.orders.push(Order::Checkpoint(self.data.freeze(), records));
    }

    /// State that must disappear when every transaction has ended.
    #[must_use]
    pub fn leaks(&self) -> Vec<Leak> {
        let prepared = self.sessions.values().filter(|session| session.is_prepared).count();
        vec![
            ("sessions", self.sessions.len() - prepared),
            ("prepared", prepared),
            ("locks", self.locks.len()),
        ]
    }

    /// Panics if the state contradicts itself.
    ///
    /// # Panics
    /// If two hold what only one may, or somebody holds what is free.
    pub fn assert_invariants(&self) {
        for (key, lock) in &self.locks {
            let writers = lock.holders.values().filter(|mode| **mode == Mode::Exclusive).count();
            assert!(writers == 0 || lock.holders.len() == 1, "{key} is held by {:?}", lock.holders);
            for (xid, mode) in &lock.holders {
                let held = self.sessions.get(xid).and_then(|session| session.held.get(key));
                assert_eq!(held, Some(mode), "{key} is held by {xid}");
            }
        }
        for (xid, session) in &self.sessions {
            for key in session.held.keys() {
                let is_held =
                    self.locks.get(key).is_some_and(|lock| lock.holders.contains_key(xid));
                assert!(is_held, "{xid} holds {key}, which is free");
            }
        }
    }
}

impl Session {
    fn new(txn: TxnId) -> Self {
        Self {
            txn,
            state: State::Idle,
            statements: Vec::new(),
            answers: Vec::new(),
            then: Then::Wait,
            held: OrdMap::new(),
            wanted: None,
            writes: Writes::new(),
            floor: Timestamp::ZERO,
            is_prepared: false,
            marks: Vec::new(),
            is_failed: false,
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (xid, session)) in self.sessions.iter().enumerate() {
            let separator = if at == 0 { "" } else { ", " };
            write!(f, "{separator}{xid}")?;
            for (key, mode) in &session.held {
                let mode = match mode {
                    Mode::Shared => "S",
                    Mode::Exclusive => "X",
                };
                write!(f, " {mode}:{key}")?;
            }
            if let Some((key, _)) = &session.wanted {
                write!(f, " waits for {key}")?;
            }
        }
        Ok(())
    }
}
