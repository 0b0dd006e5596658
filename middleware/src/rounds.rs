//! Rounds of a transaction: its next statements go to all their sources at once, and the client waits
//! for the answers of all of them.

use std::time::{Duration, Instant};

use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::{NodeId, Outcome};
use orthodrome_geotp::contract::{self, Failure, Last, Part, Reason, Xid};
use orthodrome_geotp::sql::{Answer, Dialect, Isolation, SourceId};
use tokio::sync::{Notify, mpsc};

use super::consensus::Order;
use super::driver::{Sql, is_difference};
use super::errors::interrupted;
use super::host::Heard;
use super::session::{Engine, Placed, Session, SqlError, level};
use super::words::translated;

/// The statements for the sources in a round.
#[derive(Clone, Default)]
pub(crate) struct Round {
    pub(crate) parts: OrdMap<NodeId, Part<Sql>>,
    pub(crate) orders: OrdMap<NodeId, Vec<Order>>,
}

/// An open transaction.
pub(crate) struct Open {
    pub(crate) xid: Xid,
    pub(crate) hearing: mpsc::UnboundedReceiver<Heard>,
    pub(crate) isolation: Isolation,
    pub(crate) touched: OrdSet<SourceId>,
    /// Number of rounds that the sources have answered.
    rounds: u32,
}

impl Open {
    pub(crate) fn xid(&self) -> Xid {
        self.xid
    }
}

/// Maximum number of tries of a transaction's first round.
pub(crate) const TRIES: u32 = 8;

/// Why a round failed.
pub(crate) struct Missed {
    pub(crate) error: SqlError,
    /// True if it lost a conflict, is rolled back, and may succeed when it is sent again.
    pub(crate) lost: bool,
}

impl From<SqlError> for Missed {
    fn from(error: SqlError) -> Self {
        Self { error, lost: false }
    }
}

/// A round under way.
struct Sent<'a> {
    placed: &'a [Placed],
    last: Last,
    /// The savepoint before it.
    own: Option<u32>,
    /// True if a failure may leave some of its statements carried out.
    several: bool,
    /// The number of sources of the transaction so far.
    sources: usize,
}

fn nothing_open() -> Missed {
    SqlError::new("XX000", "internal error: no transaction is open").into()
}

/// Why a round was interrupted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Interrupted {
    /// The client asked for it.
    Cancelled,
    /// Its time limit has passed.
    Late,
}

/// What may interrupt a round: the client, or a time limit.
struct Interruption {
    due: Option<Instant>,
    did: Option<Interrupted>,
}

impl Interruption {
    fn after(time: Option<Duration>) -> Self {
        Self { due: time.map(|time| Instant::now() + time), did: None }
    }

    /// Waits for what the engine says; none if the round is to be interrupted, which happens once.
    async fn hear(
        &mut self,
        hearing: &mut mpsc::UnboundedReceiver<Heard>,
        cancelled: &Notify,
    ) -> Option<Option<Heard>> {
        let is_open = self.did.is_none();
        // Without a time limit it never expires.
        let due = tokio::time::sleep_until(self.due.unwrap_or_else(Instant::now).into());
        tokio::select! {
            heard = hearing.recv() => return Some(heard),
            () = cancelled.notified(), if is_open => self.did = Some(Interrupted::Cancelled),
            () = due, if is_open && self.due.is_some() => self.did = Some(Interrupted::Late),
        }
        None
    }
}

impl Session {
    /// Sends a round. Retries it if it was the transaction's first and lost a conflict: its client
    /// has seen no result of it.
    pub(crate) async fn round(
        &mut self,
        round: Round,
        placed: &[Placed],
        last: Last,
        finishes: bool,
    ) -> Result<OrdMap<NodeId, Vec<Answer>>, SqlError> {
        if !self.deferred.is_empty() {
            Box::pin(self.send_remembered()).await?;
        }
        let is_first = self.open.is_none();
        let isolation = self.isolation();
        let only = is_first && placed.len() == 1;
        for _ in 1..TRIES {
            match self.attempt(round.clone(), placed, last, finishes, false).await {
                Ok(answers) => {
                    if self.client == Dialect::MariaDb && !self.in_transaction() {
                        self.over(true);
                    }
                    return Ok(answers);
                }
                Err(missed) if !(is_first && missed.lost) => {
                    return Err(self.missed(missed, only.then_some(isolation)));
                }
                Err(_) => self.next_isolation = Some(isolation),
            }
        }
        let missed = self.attempt(round, placed, last, finishes, false).await;
        missed.map_err(|missed| self.missed(missed, only.then_some(isolation)))
    }

    /// The error for the client. A failure at a PostgreSQL source, or of a statement at several
    /// sources, rolls back the whole transaction, but a MySQL client expects that its other
    /// statements remain. If the error does not mean a rollback, the next statement or COMMIT is
    /// refused. `first` is the isolation level of a transaction in which nothing ran before: it
    /// continues, and has lost nothing.
    fn missed(&mut self, missed: Missed, first: Option<Isolation>) -> SqlError {
        if self.client == Dialect::MariaDb && self.open.is_none() {
            let goes_on = self.in_block || !self.autocommit;
            let means_rollback = matches!(&*missed.error.sqlstate, "40001" | "40P01" | "08007");
            if goes_on && !means_rollback && first.is_some() {
                self.next_isolation = first;
                return missed.error;
            }
            self.is_failed = goes_on && !means_rollback;
            self.in_block = false;
            self.over(false);
        }
        missed.error
    }

    /// Sends a round and waits for its result. `keyed`: it names and locks each row by its key.
    pub(crate) async fn attempt(
        &mut self,
        round: Round,
        placed: &[Placed],
        last: Last,
        finishes: bool,
        keyed: bool,
    ) -> Result<OrdMap<NodeId, Vec<Answer>>, Missed> {
        self.begin(keyed).await?;
        let own = self.own_savepoint(&round, last);
        let proxy = self.proxy.clone();
        let Some(open) = self.open.as_mut() else { return Err(nothing_open()) };
        let is_touched = |(_, node): &(&SourceId, &NodeId)| round.parts.contains_key(*node);
        open.touched.extend(proxy.nodes.iter().filter(is_touched).map(|(source, _)| *source));
        open.touched
            .extend(placed.iter().flat_map(|p| p.plan.parts.iter().map(|part| part.source)));
        let sent = Sent {
            placed,
            last,
            own,
            // Without statements of the client's, remembered ones are sent.
            several: placed.len() != 1 || round.parts.len() > 1 || finishes,
            sources: open.touched.len(),
        };
        let xid = open.xid;
        if let Some(own) = own {
            proxy.engine.set_savepoint(xid, own);
        }
        // Copies of a broadcast table are compared before the commit.
        let compares = finishes && placed.iter().any(Placed::has_copies);
        proxy.engine.round(xid, round, if compares { Last::Marked } else { last });
        let is_read = placed.iter().all(|placed| placed.verb == "SELECT");
        let mut interruption = Interruption::after(self.settings.statement_time(is_read));
        let mut answers = None;
        loop {
            let Some(open) = self.open.as_mut() else { return Err(nothing_open()) };
            let hearing = interruption.hear(&mut open.hearing, &self.cancelled);
            let Some(heard) = hearing.await else {
                proxy.engine.cancel(xid);
                continue;
            };
            match heard {
                None => {
                    self.open = None;
                    let why = "the proxy stopped; the outcome of the transaction is unknown";
                    return Err(SqlError::new("08007", why).into());
                }
                Some(Heard::Answers(found)) => {
                    self.answered(&sent, &found).await?;
                    if !finishes {
                        return Ok(found);
                    }
                    if compares {
                        proxy.engine.commit(xid);
                    }
                    answers = Some(found);
                }
                Some(Heard::StatementFailed(source, failure)) => {
                    return Err(self.failed(&sent, source, failure).await);
                }
                Some(Heard::Finished(outcome, failure)) => {
                    if open.rounds > 0 {
                        self.savepoints.lose();
                    }
                    self.open = None;
                    if let (Outcome::Committed(_), Some(answers)) = (outcome, answers.take()) {
                        return Ok(answers);
                    }
                    if let (Some(why), Outcome::Aborted(_)) = (interruption.did, outcome) {
                        let is_late = why == Interrupted::Late;
                        return Err(interrupted(self.client, is_late).into());
                    }
                    let lost = matches!(outcome, Outcome::Aborted(_))
                        && failure.as_ref().is_some_and(|(_, failure)| {
                            is_transient(failure)
                                && matches!(
                                    failure.reason,
                                    Reason::Serialization | Reason::Deadlock | Reason::Peer
                                )
                        });
                    return Err(Missed { error: self.ended(outcome, failure, sent.sources), lost });
                }
            }
        }
    }

    /// Opens a transaction at the engine, unless one is open.
    async fn begin(&mut self, keyed: bool) -> Result<(), Missed> {
        if self.open.is_some() {
            return Ok(());
        }
        let isolation = self.isolation();
        // A chained transaction has this isolation level too.
        self.next_isolation = Some(isolation);
        let level = if keyed { contract::Isolation::Keyed } else { level(isolation) };
        let begun = self.proxy.engine.begin(level, self.id).await;
        let (xid, hearing) =
            begun.ok_or_else(|| SqlError::new("57P01", "the proxy is shutting down"))?;
        for savepoint in self.savepoints.numbers() {
            self.proxy.engine.set_savepoint(xid, savepoint);
        }
        self.open = Some(Open { xid, hearing, isolation, touched: OrdSet::new(), rounds: 0 });
        Ok(())
    }

    /// Handles the answers of a round: what was remembered is compared with them.
    async fn answered(
        &mut self,
        sent: &Sent<'_>,
        found: &OrdMap<NodeId, Vec<Answer>>,
    ) -> Result<(), Missed> {
        let Some(open) = self.open.as_mut() else { return Err(nothing_open()) };
        open.rounds += 1;
        let compared = sent.placed.iter().try_for_each(|one| one.compare(found));
        if let Err(error) = compared {
            let goes_on = sent.last == Last::No
                && (self.undo(sent)
                    || self.client == Dialect::PostgreSql
                        && sent.own.is_none()
                        && !self.savepoints.is_empty());
            if !goes_on {
                self.end().await;
            }
            return Err(error.into());
        }
        if let (Some(own), Some(open)) = (sent.own, &self.open) {
            self.proxy.engine.release_savepoint(open.xid, own);
        }
        Ok(())
    }

    /// Handles the failure of a statement. The transaction may continue.
    async fn failed(&mut self, sent: &Sent<'_>, source: NodeId, failure: Failure<Sql>) -> Missed {
        let is_conflict = is_transient(&failure)
            && matches!(failure.reason, Reason::Serialization | Reason::Deadlock);
        // Nothing was done before, so the whole round can be retried.
        let lost = is_conflict && self.open.as_ref().is_some_and(|open| open.rounds == 0);
        let goes_on = self.undo(sent)
            || match self.client {
                Dialect::PostgreSql => !self.savepoints.is_empty(),
                Dialect::MariaDb => !sent.several,
            };
        let error = self.error(source, failure, sent.sources);
        if lost || !goes_on {
            self.end().await;
        }
        Missed { error, lost }
    }

    /// Undoes a round that has a savepoint of its own; false if it has none.
    fn undo(&self, sent: &Sent<'_>) -> bool {
        let (Some(own), Some(open)) = (sent.own, &self.open) else { return false };
        self.proxy.engine.roll_back_to(open.xid, own);
        self.proxy.engine.release_savepoint(open.xid, own);
        true
    }

    /// A savepoint before this round, so that a failed statement of a MySQL client undoes only
    /// itself. It is needed at a PostgreSQL source, where a failure fails the whole transaction,
    /// and with several sources, of which some may have executed their part.
    fn own_savepoint(&mut self, round: &Round, last: Last) -> Option<u32> {
        let goes_on = self.in_block || !self.autocommit;
        // A branch with a savepoint of the client outlives a failure of its first statement, too.
        let had_some =
            self.open.as_ref().is_some_and(|open| open.rounds > 0) || !self.savepoints.is_empty();
        if self.client != Dialect::MariaDb || !goes_on || !had_some {
            return None;
        }
        let Engine::Xa(_) = self.proxy.engine else { return None };
        if last != Last::No && self.savepoints.is_empty() {
            // The transaction ends with these statements, in one round trip.
            return None;
        }
        let is_postgres = |node: &NodeId| {
            let id = self.proxy.nodes.iter().find(|(_, at)| *at == node).map(|(id, _)| *id);
            let source = id.and_then(|id| self.proxy.catalogue.source(id));
            source.is_some_and(|source| source.kind == Dialect::PostgreSql)
        };
        let is_needed = round.parts.len() > 1 || round.parts.keys().any(is_postgres);
        is_needed.then(|| self.savepoints.next())
    }

    /// The sources that cannot be reached at the moment, with the reasons; empty if there is none.
    fn unreached(&self) -> String {
        let unreached = self.proxy.direct.iter().filter_map(|(id, source)| {
            let name = self.proxy.catalogue.source(*id).map(|source| source.name.as_str());
            Some(format!("{}: {}", name.unwrap_or_default(), source.refusal()?))
        });
        let unreached: Vec<String> = unreached.collect();
        if unreached.is_empty() { String::new() } else { format!(" ({})", unreached.join("; ")) }
    }

    pub(crate) fn source_name(&self, node: NodeId) -> String {
        let found = self.proxy.nodes.iter().find(|(_, n)| **n == node);
        found
            .and_then(|(id, _)| self.proxy.catalogue.source(*id))
            .map_or_else(|| node.to_string(), |s| s.name.clone())
    }

    /// The error for a failure at a source, in a transaction with this number of sources.
    fn error(&self, source: NodeId, failure: Failure<Sql>, sources: usize) -> SqlError {
        if failure.fault.as_ref().is_some_and(is_difference) {
            if let Some(near) = &self.proxy.near {
                near.differs(&self.deferred);
            }
            let name = self.source_name(source);
            return SqlError::new(
                "40001",
                format!(
                    "transaction rolled back: rows at source {name} have changed since the transaction read \
                     them; try again"
                ),
            );
        }
        if let Some(fault) = failure.fault {
            let mut error = translated(fault, self.client, &self.source_name(source));
            if failure.reason == Reason::LockTimeout && sources > 1 {
                // If deadlocks across sources are not detected, they end by this time-out, and are
                // reported like others.
                error.sqlstate = "40P01".into();
            }
            return error;
        }
        let name = self.source_name(source);
        let (sqlstate, why) = match failure.reason {
            Reason::Marked => {
                ("25000", "a statement followed the one that was marked as the last".to_owned())
            }
            Reason::Session => ("40000", "the session rolled it back".to_owned()),
            Reason::Restarted => {
                ("40001", format!("source {name} restarted, so its locks may be lost"))
            }
            Reason::Connection | Reason::Unknown => {
                let id = self.proxy.nodes.iter().find(|(_, node)| **node == source);
                let refusal = id.and_then(|(id, _)| self.proxy.direct.get(id)?.refusal());
                let why = refusal.map_or_else(String::new, |why| format!(" ({why})"));
                ("40001", format!("the connection to source {name} broke{why}"))
            }
            Reason::Unprepared => ("40001", format!("source {name} could not prepare")),
            Reason::Peer => {
                ("40001", "it conflicts with another transaction at another source".to_owned())
            }
            Reason::Deadlock if !self.proxy.nodes.values().any(|node| *node == source) => {
                ("40P01", "deadlock with other transactions across several sources".to_owned())
            }
            Reason::Deadlock | Reason::Serialization | Reason::LockTimeout => {
                ("40001", format!("it conflicts with another transaction at source {name}"))
            }
            Reason::Refused => {
                ("40001", "too many transactions access the same hot records".to_owned())
            }
            Reason::Timeout => {
                let is_source = self.proxy.nodes.values().any(|node| *node == source);
                let who = if is_source { format!("source {name}") } else { "a source".to_owned() };
                ("40001", format!("{who} did not answer in time{}", self.unreached()))
            }
            reason => ("40001", format!("source {name}: {reason:?}")),
        };
        SqlError::new(sqlstate, format!("transaction rolled back: {why}; try again"))
    }

    pub(crate) fn ended(
        &self,
        outcome: Outcome,
        failure: Option<(NodeId, Failure<Sql>)>,
        sources: usize,
    ) -> SqlError {
        match (outcome, failure) {
            (Outcome::Unknown, _) => SqlError::new(
                "08007",
                "the connection to the source broke during the commit; the outcome of the transaction is unknown",
            ),
            (_, Some((source, failure))) => self.error(source, failure, sources),
            (outcome, None) => {
                SqlError::new("40001", format!("transaction rolled back: {outcome}; try again"))
            }
        }
    }
}

/// Whether a transaction with this failure may succeed if the same statements are sent again.
fn is_transient(failure: &Failure<Sql>) -> bool {
    !failure.fault.as_ref().is_some_and(is_difference)
}
