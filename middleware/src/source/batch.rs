//! Carries out one query batch of a branch: composes its text, sends it, and judges the answer.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use orthodrome_core::Timestamp;
use orthodrome_geotp::contract::{Failure, FromSource, Isolation, Mark, Reason, Then, Xid};
use orthodrome_geotp::sql::plan::Keys;
use orthodrome_geotp::sql::{Answer, Dialect, Record};
use tracing::warn;

use super::{Slot, Source, locked};
use crate::driver::{Fault, Outcome, Session, Sql, Statement, Trouble};
use crate::marks::{Failed, Marked};
use crate::names::{self, Probe};
use crate::stream;

/// How often a branch begins, if the statements with which it begins meet changes that are newer
/// than its snapshot.
const BEGINS: u32 = 4;

/// The role of a part of a query batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Piece {
    Begin,
    /// An action on a savepoint.
    Mark,
    Settings,
    Prelude(u32),
    Statement(u32),
    /// Counts the rows that statements up to this one have looked for, or fails if one is missing.
    Probe(u32),
    Prepare,
    Commit,
}

/// The executed part of an order.
#[derive(Default)]
pub(super) struct Done {
    pieces: Vec<Piece>,
    outcome: Outcome,
}

impl Done {
    /// The piece that failed, if any.
    fn stopped_at(&self) -> Option<Piece> {
        self.outcome.fault.as_ref()?;
        self.pieces.get(self.outcome.done.len()).copied()
    }

    /// True if a statement met a change that is newer than the branch's snapshot.
    fn is_conflict(&self) -> bool {
        let conflicts = |fault: &Fault| fault.sqlstate == "40001";
        let of_statement =
            |piece| matches!(piece, Piece::Prelude(_) | Piece::Statement(_) | Piece::Probe(_));
        self.outcome.fault.as_ref().is_some_and(conflicts)
            && self.stopped_at().is_some_and(of_statement)
    }

    /// The statement that failed, if one did that is not among the first `skipped`.
    fn failed(&self, skipped: usize) -> Option<Failed> {
        let fault = self.outcome.fault.as_ref()?;
        let (number, in_prelude) = match self.stopped_at()? {
            Piece::Prelude(number) => (number, true),
            Piece::Statement(number) | Piece::Probe(number) => (number, false),
            Piece::Begin | Piece::Mark | Piece::Settings | Piece::Prepare | Piece::Commit => {
                return None;
            }
        };
        // Class 42: syntax, unknown names and missing privileges.
        let took_locks = !fault.sqlstate.starts_with("42");
        Some(Failed { number: (number as usize).checked_sub(skipped)?, in_prelude, took_locks })
    }
}

/// The query batch of an order.
pub(super) struct Text {
    pub(super) begin: Option<Isolation>,
    /// The actions on savepoints, which come first; none if the branch only ends, without an
    /// answer.
    pub(super) marks: Option<Vec<Mark>>,
    pub(super) statements: Vec<Statement>,
    pub(super) then: Then,
}

impl Text {
    pub(super) fn ending(then: Then) -> Self {
        Self { begin: None, marks: None, statements: Vec::new(), then }
    }
}

/// Why an order was not completed.
pub(super) enum Ended {
    /// Another task is rolling the branch back.
    RolledBack,
    /// Its session broke.
    Lost(Trouble),
}

impl Source {
    pub(super) async fn run(&self, xid: Xid, slot: Option<Arc<Slot>>, text: Text) {
        let Text { begin, marks, statements, then } = text;
        let lost = || (self.report)(FromSource::SessionLost { xid });
        let Some(slot) = slot else { return lost() };
        // A rollback needs the slot meanwhile.
        if begin.is_some()
            && let Err(failure) = self.admit(&slot).await
        {
            if !slot.is_ended.load(Ordering::Acquire) {
                locked(&self.slots).remove(&xid);
                let goes_on = false;
                (self.report)(FromSource::RunFailed { xid, statement: 0, failure, goes_on });
            }
            return;
        }
        let mut place = slot.session.lock().await;
        if begin.is_some() && place.is_none() && !slot.is_ended.load(Ordering::Acquire) {
            let wanted = statements.first().map(|statement| statement.settings.as_slice());
            match self.session_for(wanted.unwrap_or_default()).await {
                Ok(session) => {
                    {
                        let mut handle = locked(&slot.handle);
                        handle.of = Some(session.interrupt());
                        handle.start = self.start.load(Ordering::Relaxed);
                    }
                    *locked(&slot.settings) = session.settings().to_vec();
                    *place = Some(session);
                }
                Err(trouble) => {
                    warn!(source = %self.node, "cannot open a session: {trouble}");
                    return lost();
                }
            }
        }
        // The task that rolls it back reports the result.
        if slot.is_ended.load(Ordering::Acquire) {
            return;
        }
        if statements.iter().any(|statement| statement.may_leave) {
            slot.may_leave.store(true, Ordering::Release);
        }
        let mut done = Done::default();
        let is_run = marks.is_some();
        let is_postgres = self.endpoint.kind == Dialect::PostgreSql;
        let marked =
            locked(&slot.marks).before(begin, &marks.unwrap_or_default(), statements, is_postgres);
        let mut tries = 1;
        let ended = loop {
            let ended =
                self.carry_out(xid, &slot, &mut place, begin, &marked, then, &mut done).await;
            // Nobody has seen anything of the branch yet, so it may as well begin now, with a newer
            // snapshot.
            let begins_again =
                begin.is_some() && is_postgres && ended.is_ok() && done.is_conflict();
            if !begins_again || tries == BEGINS {
                break ended;
            }
            tries += 1;
            let undo = (self.endpoint.rollback(&xid.at(self.node)), vec![Piece::Begin]);
            done = Done::default();
            if let Err(ended) = self.send(&slot, &mut place, undo, &mut done).await {
                break Err(ended);
            }
            done = Done::default();
        };
        match ended {
            Ok(()) => {
                let own = marked.statements.get(marked.again..).unwrap_or_default();
                locked(&slot.marks).note(own, done.failed(marked.again));
                let ran = is_run.then_some(marked.again);
                self.judge(xid, &slot, &mut place, done, then, ran).await;
            }
            // The task that rolls it back reports the result.
            Err(Ended::RolledBack) => {}
            Err(Ended::Lost(trouble)) => {
                // The slot remains, because the task that rolls it back must end what the server
                // may still be running.
                warn!(source = %self.node, %xid, "session lost: {trouble}");
                *place = None;
                lost();
            }
        }
    }

    /// Runs an order of a branch: in one query batch, unless a row that it looks for is missing.
    #[allow(
        clippy::too_many_arguments,
        reason = "an order, where it is carried out, and what comes of it"
    )]
    async fn carry_out(
        &self,
        xid: Xid,
        slot: &Slot,
        place: &mut Option<Session>,
        begin: Option<Isolation>,
        marked: &Marked,
        then: Then,
        done: &mut Done,
    ) -> Result<(), Ended> {
        let statements = &marked.statements[..];
        let none = Marked::default();
        let sought = statements.iter().any(|statement| !statement.keys.sought.is_empty());
        if sought && then != Then::Wait && begin.is_some() {
            let text = self.compose(xid, slot, begin, marked, then, Probe::Fail);
            self.send(slot, place, text, done).await?;
            let is_missed = matches!(done.stopped_at(), Some(Piece::Probe(_)))
                && done.outcome.fault.as_ref().is_some_and(|fault| fault.sqlstate == "22012");
            if !is_missed {
                return Ok(());
            }
            // The order runs again from the beginning, so that the missing row can be locked before
            // the branch ends.
            *done = Done::default();
            let undo = (self.endpoint.rollback(&xid.at(self.node)), vec![Piece::Begin]);
            self.send(slot, place, undo, done).await?;
            *done = Done::default();
        } else if !sought {
            let text = self.compose(xid, slot, begin, marked, then, Probe::Count);
            return self.send(slot, place, text, done).await;
        }
        let text = self.compose(xid, slot, begin, marked, Then::Wait, Probe::Count);
        self.send(slot, place, text, done).await?;
        self.lock_missed(slot, place, statements, done).await?;
        if then != Then::Wait && done.outcome.fault.is_none() {
            let text = self.compose(xid, slot, None, &none, then, Probe::Count);
            self.send(slot, place, text, done).await?;
        }
        Ok(())
    }

    /// Runs one query batch of a branch, after those that are done.
    pub(super) async fn send(
        &self,
        slot: &Slot,
        place: &mut Option<Session>,
        (text, pieces): (String, Vec<Piece>),
        done: &mut Done,
    ) -> Result<(), Ended> {
        if slot.is_ended.load(Ordering::Acquire) {
            return Err(Ended::RolledBack);
        }
        let Some(session) = place.as_mut() else {
            return Err(Ended::Lost(Trouble::Broken(stream::closed())));
        };
        slot.texts.fetch_add(1, Ordering::AcqRel);
        let outcome = session.text(&text, self.endpoint.one_way).await.map_err(Ended::Lost)?;
        done.pieces.extend(pieces);
        done.outcome.done.extend(outcome.done);
        done.outcome.fault = outcome.fault;
        let mut settings = locked(&slot.settings);
        if done.stopped_at() == Some(Piece::Settings) {
            // The session's settings are unknown now: they are set again before the next batch, and
            // no other branch uses the session.
            settings.iter_mut().for_each(|setting| setting.value.clear());
            locked(&slot.handle).under_way += 1;
        }
        session.has_settings(settings.clone());
        Ok(())
    }

    /// PostgreSQL has no locks for missing rows. So rows that were not found are locked by name, as
    /// an insert locks them. They may have been inserted since this transaction's snapshot, so
    /// another session checks that.
    async fn lock_missed(
        &self,
        slot: &Slot,
        place: &mut Option<Session>,
        statements: &[Statement],
        done: &mut Done,
    ) -> Result<(), Ended> {
        if done.outcome.fault.is_some() {
            return Ok(());
        }
        let probes = done.pieces.iter().zip(&done.outcome.done);
        let counts = probes
            .filter(|(piece, _)| matches!(piece, Piece::Probe(_)))
            .flat_map(|(_, (answer, _))| answer.rows.iter().flatten().cloned());
        let probed: Vec<(&Keys, &Record, Vec<u8>)> = statements
            .iter()
            .flat_map(|Statement { keys, .. }| keys.sought.iter().map(move |one| (keys, one)))
            .zip(counts)
            .map(|((keys, record), count)| (keys, record, count.unwrap_or_default()))
            .collect();
        locked(&slot.missing).note(probed.iter().map(|(keys, _, maker)| (*keys, &maker[..])));
        let missed: Vec<&Record> = probed
            .iter()
            .filter(|(.., count)| count == b"0")
            .map(|(_, record, _)| *record)
            .collect();
        if missed.is_empty() {
            return Ok(());
        }
        let has_savepoints = !locked(&slot.marks).is_empty();
        let piece = Piece::Probe(statements.len().saturating_sub(1) as u32);
        self.send(slot, place, (names::holding_off(&missed, has_savepoints), vec![piece]), done)
            .await?;
        if done.outcome.fault.is_some() {
            return Ok(());
        }
        let again = {
            let mut itself = locked(&slot.missing);
            if let Some((answer, _)) = done.outcome.done.last() {
                itself.learn(answer);
            }
            names::looking_again(&missed, &itself)
        };
        let settings = locked(&slot.settings).clone();
        let found = self.ask_with(&again, &settings, false).await;
        let message = match found {
            Ok(Outcome { fault: None, done }) => {
                let cell =
                    done.first().and_then(|(answer, _)| answer.rows.first()?.first()?.clone());
                if cell.as_deref() == Some(b"f") {
                    return Ok(());
                }
                "a row appeared that this transaction has looked for and not found".to_owned()
            }
            Ok(Outcome { fault: Some(fault), .. }) => fault.message,
            Err(trouble) => trouble.to_string(),
        };
        done.pieces.push(piece);
        done.outcome.fault = Some(Fault { sqlstate: "40001".into(), number: 0, message });
        Ok(())
    }

    /// Composes a query batch, with the role of each statement.
    fn compose(
        &self,
        xid: Xid,
        slot: &Slot,
        begin: Option<Isolation>,
        marked: &Marked,
        then: Then,
        probe: Probe,
    ) -> (String, Vec<Piece>) {
        let statements = &marked.statements[..];
        let name = xid.at(self.node);
        let mut texts: Vec<String> = Vec::new();
        let mut pieces = Vec::new();
        let count = |text: &str| {
            if self.endpoint.kind == Dialect::MariaDb { text.split(';').count() } else { 1 }
        };
        let own = |piece: Piece, text: String, texts: &mut Vec<String>, pieces: &mut Vec<Piece>| {
            pieces.extend(std::iter::repeat_n(piece, count(&text)));
            texts.push(text);
        };
        if let Some(isolation) = begin {
            // No other transaction waits for locks of a branch that ends with this batch.
            let is_numbered = then != Then::Commit && self.is_numbering.load(Ordering::Acquire);
            let begin = self.endpoint.begin(&name, isolation, is_numbered);
            own(Piece::Begin, begin, &mut texts, &mut pieces);
        }
        for text in &marked.texts {
            texts.push(text.clone());
            pieces.push(Piece::Mark);
        }
        if marked.goes_back && self.endpoint.kind == Dialect::PostgreSql {
            // A rollback to a savepoint also undoes later settings, so all of them are set again.
            locked(&slot.settings).iter_mut().for_each(|setting| setting.value.clear());
        }
        if let Some(first) = statements.first() {
            let mut settings = locked(&slot.settings);
            if begin.is_some() && self.endpoint.kind == Dialect::PostgreSql {
                settings.clear();
            }
            for text in self.endpoint.settle(&settings, &first.settings) {
                texts.push(text);
                pieces.push(Piece::Settings);
            }
            settings.clone_from(&first.settings);
        }
        for (number, statement) in statements.iter().enumerate() {
            let number = number as u32;
            let keys = &statement.keys;
            let asked = (!keys.sought.is_empty()).then(|| probe.text(keys));
            let inserts = names::inserting(keys, &slot.named);
            let before =
                asked.clone().filter(|_| keys.is_delete).map(|text| (Piece::Probe(number), text));
            let after = asked.filter(|_| !keys.is_delete).map(|text| (Piece::Probe(number), text));
            let preludes = inserts.into_iter().chain(statement.prelude.iter().cloned());
            let preludes = preludes.map(|text| (Piece::Prelude(number), text));
            let itself = [(Piece::Statement(number), statement.text.clone())];
            for (piece, text) in before.into_iter().chain(preludes).chain(itself).chain(after) {
                pieces.push(piece);
                texts.push(text);
            }
        }
        match then {
            Then::Wait => {}
            Then::Prepare => {
                own(Piece::Prepare, self.endpoint.prepare(&name), &mut texts, &mut pieces)
            }
            Then::Commit => {
                own(Piece::Commit, self.endpoint.commit(&name), &mut texts, &mut pieces)
            }
        }
        (texts.join(";\n"), pieces)
    }

    /// Reports the result of a query batch to the agent.
    pub(super) async fn judge(
        &self,
        xid: Xid,
        slot: &Slot,
        place: &mut Option<Session>,
        Done { pieces, outcome }: Done,
        then: Then,
        ran: Option<usize>,
    ) {
        // Statements that only take locks again precede the client's.
        let again = ran.unwrap_or_default() as u32;
        let mut answers: Vec<Answer> = Vec::new();
        let mut tag = String::new();
        for (piece, (answer, its)) in pieces.iter().zip(outcome.done.iter().cloned()) {
            match piece {
                Piece::Statement(number) if *number >= again => answers.push(answer),
                Piece::Statement(_)
                | Piece::Begin
                | Piece::Mark
                | Piece::Settings
                | Piece::Prelude(_)
                | Piece::Probe(_) => {}
                Piece::Prepare | Piece::Commit => tag = its,
            }
        }
        let is_run = ran.is_some();
        let ran = || {
            if is_run {
                (self.report)(FromSource::Ran { xid, answers: answers.clone() });
            }
        };
        if let Some(fault) = outcome.fault {
            let (failure, goes_on) = self.endpoint.judge(fault);
            // At PostgreSQL the transaction has failed, back to its last savepoint if it has one.
            let goes_on = goes_on || self.can_go_back(slot, &failure);
            match pieces.get(outcome.done.len()) {
                Some(
                    Piece::Prelude(statement)
                    | Piece::Probe(statement)
                    | Piece::Statement(statement),
                ) => {
                    let goes_on = goes_on && *statement >= again;
                    (self.report)(FromSource::RunFailed {
                        xid,
                        statement: statement.saturating_sub(again),
                        failure,
                        goes_on,
                    });
                }
                Some(Piece::Mark) => {
                    let goes_on = false;
                    (self.report)(FromSource::RunFailed { xid, statement: 0, failure, goes_on });
                }
                Some(Piece::Settings) => {
                    (self.report)(FromSource::RunFailed { xid, statement: 0, failure, goes_on });
                }
                Some(Piece::Prepare | Piece::Commit) => {
                    ran();
                    self.refuse(xid, slot, place, failure).await;
                }
                Some(Piece::Begin) if self.endpoint.reads_whole(failure.fault.as_ref()) => {
                    // Nothing of the batch has run: the source could not parse a statement.
                    let goes_on = false;
                    (self.report)(FromSource::RunFailed { xid, statement: 0, failure, goes_on });
                }
                Some(Piece::Begin) | None => {
                    // The table of numbers may have been dropped; the watch makes it anew. An
                    // interrupt says nothing about it.
                    if failure.fault.as_ref().is_some_and(|fault| !fault.is_interrupt()) {
                        self.is_numbering.store(false, Ordering::Release);
                    }
                    *place = None;
                    locked(&self.slots).remove(&xid);
                    let (failure, goes_on) = (Reason::Connection.into(), false);
                    (self.report)(FromSource::RunFailed { xid, statement: 0, failure, goes_on });
                }
            }
            return;
        }
        ran();
        // Only the tag shows whether this succeeded: a failed transaction is "prepared" or
        // "committed" by a rollback.
        let is_said = |word: &str| self.endpoint.kind == Dialect::MariaDb || tag == word;
        match then {
            Then::Wait => {}
            Then::Prepare if is_said("PREPARE TRANSACTION") => {
                slot.is_prepared.store(true, Ordering::Release);
                if self.endpoint.kind == Dialect::PostgreSql
                    && let Some(session) = place.take()
                {
                    // The prepared transaction belongs to no session any more.
                    self.release(slot, session);
                }
                (self.report)(FromSource::Prepared { xid, floor: Timestamp::ZERO });
            }
            Then::Commit if is_said("COMMIT") => {
                self.finish(xid, slot, place);
                (self.report)(FromSource::Committed { xid, at: Timestamp::ZERO });
            }
            Then::Prepare | Then::Commit => {
                self.refuse(xid, slot, place, Reason::Unprepared.into()).await
            }
        }
    }

    /// Whether a branch with this failure can roll back to a savepoint. An interrupted branch must
    /// end.
    fn can_go_back(&self, slot: &Slot, failure: &Failure<Sql>) -> bool {
        self.endpoint.kind == Dialect::PostgreSql
            && failure.reason != Reason::Peer
            && !locked(&slot.marks).is_empty()
    }

    /// Ends a branch; its session can serve others.
    fn finish(&self, xid: Xid, slot: &Slot, place: &mut Option<Session>) {
        if let Some(session) = place.take() {
            self.release(slot, session);
        }
        locked(&self.slots).remove(&xid);
    }

    /// Rolls back a branch that could not prepare.
    async fn refuse(
        &self,
        xid: Xid,
        slot: &Slot,
        place: &mut Option<Session>,
        failure: Failure<Sql>,
    ) {
        self.undo(xid, slot, place).await;
        locked(&self.slots).remove(&xid);
        (self.report)(FromSource::Refused { xid, failure });
    }
}
