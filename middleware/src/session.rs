//! A client's session, independent of its protocol: turns statements into rounds of a transaction.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::txn::Key;
use orthodrome_core::{NodeId, Outcome};
use orthodrome_geotp::contract::{self, Last, Part, SessionId, Xid};
use orthodrome_geotp::sql::catalog::Table;
use orthodrome_geotp::sql::merge::{Merge, merge};
use orthodrome_geotp::sql::plan::Keys;
use orthodrome_geotp::sql::set::{Effects, effects, locks_rows, set_config};
use orthodrome_geotp::sql::{
    Answer, Catalogue, Column, Context, Dialect, Isolation, Kind, Parsed, Plan, SourceId, Value,
    Verb, name_columns, plan,
};
use tokio::sync::{Notify, mpsc};

use super::catalogue::Catalogues;
use super::consensus::{Consensus, Order};
use super::cursors::Cursor;
use super::discovery::Discovered;
use super::driver::Statement;
pub(crate) use super::errors::SqlError;
use super::host::{Heard, MiddlewareHost};
use super::keys::{Blocks, Generated, LastValues};
use super::near::{Deferred, Near, OwnChanges};
use super::rounds::{Open, Round};
use super::savepoints::Savepoints;
use super::settings::Settings;
use super::source::Source;

/// Names and kinds of a table's columns.
type Columns = Vec<(String, Kind)>;

/// The state that all sessions share.
pub(crate) struct Proxy {
    /// The sources, and the tables of the proxy's file.
    pub(crate) catalogue: Catalogue,
    /// Tables as discovered at the sources.
    pub(crate) discovered: Discovered,
    /// What clients see of the tables of all sources.
    pub(crate) catalogues: Catalogues,
    /// The source for tables that clients create without a placement.
    pub(crate) new_tables: Option<SourceId>,
    /// Blocks of generated keys.
    pub(crate) blocks: Blocks,
    /// The node id of each source.
    pub(crate) nodes: OrdMap<SourceId, NodeId>,
    /// The sources, nearest first.
    pub(crate) by_distance: Vec<SourceId>,
    /// Sources for statements outside of transactions: changes of the schema, and system
    /// catalogues.
    pub(crate) direct: OrdMap<SourceId, Arc<Source>>,
    pub(crate) engine: Engine,
    pub(crate) isolation: Isolation,
    /// True if writing statements of a round come last (QURO).
    pub(crate) writes_last: bool,
    /// The names that clients may use for the database.
    pub(crate) databases: OrdSet<String>,
    /// Values of settings that sources have accepted.
    pub(crate) taken: Mutex<OrdSet<String>>,
    /// Columns of tables at sources, and the time of the query for them.
    pub(crate) kinds: Mutex<OrdMap<(SourceId, String), (Instant, Columns)>>,
    /// Number of sessions so far.
    pub(crate) sessions: AtomicU64,
    /// The mode `near`.
    pub(crate) near: Option<Near>,
}

impl Proxy {
    pub(crate) fn taken(&self) -> MutexGuard<'_, OrdSet<String>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn kinds(&self) -> MutexGuard<'_, OrdMap<(SourceId, String), (Instant, Columns)>> {
        self.kinds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The engine that executes transactions.
pub(crate) enum Engine {
    /// Branches at sources with an atomic commit: GeoTP, and the baselines that use XA.
    Xa(MiddlewareHost),
    /// Records with optimistic concurrency control: ScalarDB.
    ByKey(Consensus),
}

impl Engine {
    pub(crate) async fn begin(
        &self,
        isolation: contract::Isolation,
        session: SessionId,
    ) -> Option<(Xid, mpsc::UnboundedReceiver<Heard>)> {
        match self {
            Self::Xa(middleware) => middleware.begin(isolation, session).await,
            Self::ByKey(consensus) => consensus.begin().await,
        }
    }

    pub(crate) fn round(&self, xid: Xid, round: Round, last: Last) {
        match self {
            Self::Xa(middleware) => middleware.round(xid, round.parts, last),
            Self::ByKey(consensus) => consensus.round(xid, round.orders, last),
        }
    }

    pub(crate) fn commit(&self, xid: Xid) {
        match self {
            Self::Xa(middleware) => middleware.commit(xid),
            Self::ByKey(consensus) => consensus.commit(xid),
        }
    }

    pub(crate) fn rollback(&self, xid: Xid) {
        match self {
            Self::Xa(middleware) => middleware.rollback(xid),
            Self::ByKey(consensus) => consensus.rollback(xid),
        }
    }

    pub(crate) fn set_savepoint(&self, xid: Xid, savepoint: u32) {
        if let Self::Xa(middleware) = self {
            middleware.set_savepoint(xid, savepoint);
        }
    }

    pub(crate) fn roll_back_to(&self, xid: Xid, savepoint: u32) {
        if let Self::Xa(middleware) = self {
            middleware.roll_back_to(xid, savepoint);
        }
    }

    pub(crate) fn release_savepoint(&self, xid: Xid, savepoint: u32) {
        if let Self::Xa(middleware) = self {
            middleware.release_savepoint(xid, savepoint);
        }
    }

    pub(crate) fn cancel(&self, xid: Xid) {
        match self {
            Self::Xa(middleware) => middleware.cancel(xid),
            Self::ByKey(consensus) => consensus.rollback(xid),
        }
    }

    pub(crate) fn notes(&self) -> OrdMap<String, u64> {
        fn named<N: std::fmt::Debug>(notes: OrdMap<N, u64>) -> OrdMap<String, u64> {
            notes.into_iter().map(|(note, count)| (format!("{note:?}"), count)).collect()
        }
        match self {
            Self::Xa(middleware) => named(middleware.notes()),
            Self::ByKey(consensus) => named(consensus.notes()),
        }
    }

    pub(crate) fn xa(&self) -> Result<&MiddlewareHost, SqlError> {
        match self {
            Self::Xa(middleware) => Ok(middleware),
            Self::ByKey(_) => Err(SqlError::new(
                "0A000",
                "the `mode` of this proxy does not support this; use another `mode` in its configuration file",
            )),
        }
    }
}

/// The result of a statement.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Reply {
    /// Rows, with the first word of PostgreSQL's command tag.
    Rows(Answer, &'static str),
    /// No rows: the command tag, and the numbers for MySQL clients.
    Done { tag: String, affected: u64, last_insert_id: u64 },
    /// It failed. No further statement of the same batch runs.
    Error(SqlError),
}

impl Reply {
    pub(crate) fn done(tag: &str) -> Self {
        Self::Done { tag: tag.to_owned(), affected: 0, last_insert_id: 0 }
    }
}

/// The error for a MySQL client whose transaction has ended without its knowledge.
fn rolled_back_before() -> SqlError {
    SqlError::new(
        "40001",
        "transaction rolled back: an earlier statement failed, and PostgreSQL keeps nothing of a \
         transaction in which one did; begin it again",
    )
}

/// A client's session.
pub(crate) struct Session {
    pub(crate) id: SessionId,
    pub(crate) proxy: Arc<Proxy>,
    pub(crate) client: Dialect,
    /// The isolation level of the next transaction.
    pub(crate) next_isolation: Option<Isolation>,
    /// The access mode that was set for the current or next transaction.
    pub(crate) read_only: Option<bool>,
    pub(crate) autocommit: bool,
    /// True after BEGIN, until COMMIT or ROLLBACK.
    pub(crate) in_block: bool,
    /// True if a failure has ended the transaction and the client has not acknowledged that: a
    /// PostgreSQL client by ending the transaction, a MySQL client by its next statement, which is
    /// refused.
    pub(crate) is_failed: bool,
    pub(crate) open: Option<Open>,
    pub(crate) settings: Settings,
    pub(crate) savepoints: Savepoints,
    /// Statements that were prepared with SQL.
    pub(crate) prepared: OrdMap<String, Parsed>,
    pub(crate) cursors: OrdMap<String, Cursor>,
    /// Tables that the transaction has created.
    pub(crate) created: OrdMap<String, Table>,
    /// True if the transaction changes the schema.
    pub(crate) has_schema: bool,
    pub(crate) last_values: LastValues,
    /// Statements of the open transaction of which no source knows yet.
    pub(crate) deferred: Deferred,
    pub(crate) own_changes: OwnChanges,
    /// Number of transactions since the last commit whose remembered statements were sent to the
    /// sources.
    pub(crate) unconfirmed: u32,
    /// The last generated key; 0 if there is none.
    pub(crate) last_insert_id: u64,
    /// Number of transactions that have ended.
    pub(crate) ended: u64,
    /// True if rows that an UPDATE found and left as they were count as affected.
    pub(crate) counts_found: bool,
    /// Notified when the client cancels the running statement.
    pub(crate) cancelled: Arc<Notify>,
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(open) = &self.open {
            self.proxy.engine.rollback(open.xid);
        }
    }
}

/// One client statement within a round.
pub(crate) struct Placed {
    pub(crate) plan: Plan,
    pub(crate) verb: &'static str,
    /// The position of each part's answer: the source, and the index there.
    places: Vec<(NodeId, usize)>,
    /// The generated keys of an INSERT.
    generated: Option<Generated>,
}

impl Placed {
    pub(crate) fn new(plan: Plan, verb: &'static str, places: Vec<(NodeId, usize)>) -> Self {
        Self { plan, verb, places, generated: None }
    }

    /// Whether it changes several copies of a broadcast table.
    pub(crate) fn has_copies(&self) -> bool {
        self.plan.merge == Merge::Same && self.places.len() > 1
    }

    /// Refuses answers of copies that differ.
    pub(crate) fn compare(&self, answers: &OrdMap<NodeId, Vec<Answer>>) -> Result<(), SqlError> {
        if !self.has_copies() {
            return Ok(());
        }
        let counts = self.places.iter().filter_map(|(node, place)| {
            let affected = answers.get(node)?.get(*place)?.affected;
            Some(Answer { affected, ..Answer::default() })
        });
        merge(&self.plan.merge, counts.collect())?;
        Ok(())
    }
}

pub(crate) fn level(isolation: Isolation) -> contract::Isolation {
    match isolation {
        Isolation::Serializable => contract::Isolation::Serializable,
        Isolation::RepeatableRead => contract::Isolation::RepeatableRead,
        Isolation::ReadCommitted => contract::Isolation::ReadCommitted,
    }
}

impl Session {
    pub(crate) fn new(proxy: Arc<Proxy>, client: Dialect) -> Self {
        Self {
            id: SessionId(proxy.sessions.fetch_add(1, Ordering::Relaxed)),
            proxy,
            client,
            next_isolation: None,
            read_only: None,
            autocommit: true,
            in_block: false,
            is_failed: false,
            open: None,
            settings: Settings::new(client),
            savepoints: Savepoints::default(),
            prepared: OrdMap::new(),
            cursors: OrdMap::new(),
            created: OrdMap::new(),
            has_schema: false,
            last_values: LastValues::default(),
            deferred: Deferred::default(),
            own_changes: OwnChanges::default(),
            unconfirmed: 0,
            last_insert_id: 0,
            ended: 0,
            counts_found: true,
            cancelled: Arc::default(),
        }
    }

    pub(crate) fn id(&self) -> SessionId {
        self.id
    }

    /// Checks the name of the database. MySQL clients need not send one.
    pub(crate) fn check_database(&self, name: &str) -> Result<(), SqlError> {
        let is_none = self.client == Dialect::MariaDb && name.is_empty();
        if is_none || self.proxy.databases.contains(name) {
            return Ok(());
        }
        Err(match self.client {
            Dialect::PostgreSql => {
                SqlError::new("3D000", format!("database \"{name}\" does not exist"))
            }
            Dialect::MariaDb => SqlError {
                sqlstate: "42000".into(),
                number: 1049,
                message: format!("Unknown database '{name}'"),
                position: 0,
            },
        })
    }

    /// The current time limit for a silent client, and whether it is in a transaction.
    pub(crate) fn idle_time(&self) -> Option<(Duration, bool)> {
        self.settings.idle_time(self.in_transaction())
    }

    /// The transaction status in PostgreSQL's protocol.
    pub(crate) fn status(&self) -> u8 {
        match (self.is_failed, self.in_block) {
            (true, _) => b'E',
            (false, true) => b'T',
            (false, false) => b'I',
        }
    }

    pub(crate) fn is_autocommit(&self) -> bool {
        self.autocommit
    }

    /// True if a transaction is open that the client must end.
    pub(crate) fn in_transaction(&self) -> bool {
        self.in_block || self.open.is_some() || !self.deferred.is_empty()
    }

    pub(crate) async fn reset(&mut self) {
        self.end().await;
        self.in_block = false;
        self.is_failed = false;
        self.autocommit = true;
        self.next_isolation = None;
        self.read_only = None;
        self.savepoints.clear();
        self.prepared.clear();
        self.cursors.clear();
        self.settings.discard();
    }

    /// The isolation level of the next transaction.
    pub(crate) fn isolation(&self) -> Isolation {
        let level = self.next_isolation.or(self.settings.isolation());
        level.unwrap_or(self.proxy.isolation)
    }

    /// The isolation level of the current or next transaction.
    pub(crate) fn open_isolation(&self) -> Isolation {
        self.open.as_ref().map_or_else(|| self.isolation(), |open| open.isolation)
    }

    /// True if the current or next transaction is read-only.
    pub(crate) fn is_read_only(&self) -> bool {
        self.read_only.unwrap_or_else(|| self.settings.is_read_only())
    }

    /// Handles the end of the transaction.
    pub(crate) fn over(&mut self, is_committed: bool) {
        self.ended += 1;
        self.deferred.clear();
        self.own_changes.end(is_committed);
        if is_committed {
            self.unconfirmed = 0;
        }
        self.end_schema(is_committed);
        self.cursors.retain(|_, cursor| is_committed && cursor.is_held());
        self.settings.end(is_committed);
        self.savepoints.clear();
        self.next_isolation = None;
        self.read_only = None;
    }

    /// Runs the statements of one batch, or of one pipeline. The last reply is an error if one
    /// failed.
    pub(crate) async fn run(&mut self, statements: &[(Parsed, Vec<Value>)]) -> Vec<Reply> {
        let statements = self.with_prepared(statements);
        let mut replies = self.run_all(&statements).await;
        for ((parsed, _), reply) in statements.iter().zip(&mut replies) {
            if let Reply::Rows(answer, _) = reply {
                name_columns(parsed, self.client, &mut answer.columns);
            }
        }
        replies
    }

    async fn run_all(&mut self, statements: &[(Parsed, Vec<Value>)]) -> Vec<Reply> {
        let mut replies = Vec::new();
        let mut at = 0;
        let is_postgres = self.client == Dialect::PostgreSql;
        if is_postgres && !self.in_block {
            // A batch is a transaction by itself.
            self.settings.begin();
        }
        while let Some((parsed, values)) = statements.get(at) {
            let count = self.batch(statements.get(at..).unwrap_or_default());
            let found = if count > 0 {
                let batch = statements.get(at..at + count).unwrap_or_default();
                at += count;
                // In PostgreSQL a batch of several statements is one transaction.
                let ends =
                    self.client == Dialect::PostgreSql && !self.in_block && at == statements.len();
                let next = statements.get(at).map(|(next, _)| &next.verb);
                let commits = self.in_block && matches!(next, Some(Verb::Commit { chain: false }));
                self.data(batch, ends, commits).await
            } else {
                at += 1;
                self.other(parsed, values).await.map(|reply| vec![reply])
            };
            match found {
                Ok(more) => {
                    self.remember_keys(&more);
                    replies.extend(more);
                }
                Err(error) => {
                    self.fail().await;
                    if is_postgres && !self.in_block {
                        self.over(false);
                    }
                    replies.push(Reply::Error(error));
                    return replies;
                }
            }
        }
        if is_postgres && !self.in_block {
            // If a transaction is open, the last statement of a batch without BEGIN was not about
            // rows.
            match self.commit().await {
                Ok(_) => self.over(true),
                Err(error) => {
                    replies.pop();
                    replies.push(Reply::Error(error));
                }
            }
        }
        replies
    }

    /// Stores the last generated key, for `LAST_INSERT_ID()`.
    fn remember_keys(&mut self, replies: &[Reply]) {
        for reply in replies {
            if let Reply::Done { last_insert_id, .. } = reply
                && *last_insert_id > 0
            {
                self.last_insert_id = *last_insert_id;
            }
        }
    }

    /// The number of these statements that can be in one round.
    fn batch(&self, statements: &[(Parsed, Vec<Value>)]) -> usize {
        let data = statements.iter().take_while(|(parsed, _)| matches!(parsed.verb, Verb::Data(_)));
        let mut count = 0;
        for (parsed, _) in data {
            if count > 0 && asks_for_keys(parsed) {
                // It can run only when earlier statements have been answered.
                break;
            }
            count += 1;
            // MySQL commits each statement of a batch by itself.
            if parsed.is_last
                || (self.client == Dialect::MariaDb && self.autocommit && !self.in_block)
            {
                break;
            }
        }
        let next = statements.get(count).map(|(next, _)| &next.verb);
        if count > 1 && self.may_defer() && !matches!(next, Some(Verb::Commit { .. })) {
            // Each is answered from copies by itself.
            return 1;
        }
        count
    }

    /// Handles an error: at PostgreSQL the transaction has failed, until it ends or rolls back to a
    /// savepoint.
    pub(crate) async fn fail(&mut self) {
        if self.client == Dialect::PostgreSql {
            self.is_failed = self.in_block;
            if self.savepoints.is_empty() {
                self.end().await;
            }
        }
    }

    /// Notes that the transaction has rolled back to a savepoint.
    pub(crate) fn went_back(&mut self) {
        self.is_failed = false;
    }

    /// Rolls back the open transaction, if there is one.
    pub(crate) async fn end(&mut self) {
        self.deferred.clear();
        if let Some(mut open) = self.open.take() {
            self.proxy.engine.rollback(open.xid);
            while let Some(heard) = open.hearing.recv().await {
                if matches!(heard, Heard::Finished(..)) {
                    break;
                }
            }
        }
    }

    /// Refuses statements after a failure that ended the transaction. A MySQL client gets this
    /// error once, with the number that means a rollback.
    pub(crate) fn check_failed(&mut self) -> Result<(), SqlError> {
        match self.client {
            Dialect::PostgreSql if self.is_failed => Err(SqlError::new(
                "25P02",
                "current transaction is aborted, commands ignored until end of transaction block",
            )),
            Dialect::MariaDb if std::mem::take(&mut self.is_failed) => Err(rolled_back_before()),
            Dialect::PostgreSql | Dialect::MariaDb => Ok(()),
        }
    }

    pub(crate) fn prefer(&self) -> Vec<SourceId> {
        let touched = self.open.iter().flat_map(|open| open.touched.iter().copied());
        touched
            .chain(self.deferred.sources())
            .chain(self.proxy.by_distance.iter().copied())
            .collect()
    }

    pub(crate) async fn planned(
        &self,
        parsed: &Parsed,
        values: &[Value],
    ) -> Result<Plan, SqlError> {
        let (Verb::Data(statement) | Verb::Schema(statement)) = &parsed.verb else {
            return Err(SqlError::new("XX000", "internal error: the statement has no plan"));
        };
        let isolation = self.open.as_ref().map_or_else(|| self.isolation(), |open| open.isolation);
        let by_key = matches!(self.proxy.engine, Engine::ByKey(_));
        // This mode takes no locks at sources.
        let isolation = if by_key { Isolation::ReadCommitted } else { isolation };
        let kinds = self.kinds_for(parsed, values).await;
        let (client, prefer) = (self.client, self.prefer());
        let default_source = self.default_source();
        let collations = self.collations_for(statement).await;
        let context =
            Context { client, isolation, prefer, kinds, collations, by_key, default_source };
        let plan = plan(&self.catalogue(), statement, values, &context)?;
        self.with_source(parsed, values, plan)
    }

    /// Runs statements that read or change rows, in one round.
    pub(crate) async fn data(
        &mut self,
        batch: &[(Parsed, Vec<Value>)],
        ends: bool,
        commits: bool,
    ) -> Result<Vec<Reply>, SqlError> {
        self.check_failed()?;
        let batch = &self.with_variables_in(batch)[..];
        let mut placed: Vec<Placed> = Vec::new();
        let mut round = Round::default();
        let mut replies: Vec<Option<Reply>> = Vec::new();
        let mut is_last = false;
        let mut order: Vec<usize> = (0..batch.len()).collect();
        let mut plans = Vec::new();
        let mut keyed: OrdMap<usize, (Parsed, Generated)> = OrdMap::new();
        let mut counted: OrdMap<usize, Parsed> = OrdMap::new();
        for (index, (parsed, values)) in batch.iter().enumerate() {
            is_last |= parsed.is_last;
            self.discover(&parsed.verb).await?;
            counted.extend(self.with_sequences(parsed).await?.map(|parsed| (index, parsed)));
            let parsed = counted.get(&index).unwrap_or(parsed);
            let by_key = matches!(self.proxy.engine, Engine::ByKey(_));
            if !by_key && let Some(with_keys) = self.with_keys(parsed, values).await? {
                keyed.insert(index, with_keys);
            }
            let parsed = keyed.get(&index).map_or(parsed, |(parsed, _)| parsed);
            let may_leave = self.check_may_run(parsed, values)?;
            match self.planned(parsed, values).await {
                Ok(plan) => plans.push((plan, may_leave)),
                Err(refusal) if batch.len() == 1 => {
                    let reply = self.gather(parsed, values, refusal).await?;
                    return Ok(vec![reply]);
                }
                Err(refusal) => {
                    let error = Box::pin(self.data_around(batch, index, refusal, ends, commits));
                    return error.await;
                }
            }
            if let ([_], [(plan, _)], false) = (batch, plans.as_slice(), ends || commits)
                && let Some(reply) = self.defer(parsed, values, plan).await?
            {
                let Some((_, generated)) = keyed.remove(&index) else { return Ok(vec![reply]) };
                return Ok(vec![self.with_generated(&generated, reply)]);
            }
        }
        if plans.iter().any(|(plan, _)| !plan.parts.is_empty()) && !self.deferred.is_empty() {
            if self.client == Dialect::PostgreSql {
                self.note_sent_early();
                round = self.remembered(false);
            } else {
                // If a statement of a MySQL client fails, the earlier ones remain.
                self.send_remembered().await?;
            }
        }
        if self.proxy.writes_last {
            order.sort_by_key(|&index| plans.get(index).is_some_and(|(plan, _)| plan.is_write));
        }
        let mut by_statement: OrdMap<usize, Placed> = OrdMap::new();
        for index in order {
            let (Some((plan, may_leave)), Some((parsed, values))) =
                (plans.get(index), batch.get(index))
            else {
                continue;
            };
            let generated = keyed.get(&index).map(|(_, generated)| generated.clone());
            let parsed = counted.get(&index).unwrap_or(parsed);
            if plan.parts.is_empty() {
                let answer = match self.set_config(parsed, values).await? {
                    Some(answer) => answer,
                    None => self.elsewhere(parsed, values).await?,
                };
                replies.resize(index, None);
                replies.push(Some(Reply::Rows(answer, "SELECT")));
                continue;
            }
            let verb = parsed.word();
            let places = self.place(&mut round, plan, *may_leave, verb != "SELECT");
            by_statement.insert(index, Placed { plan: plan.clone(), verb, places, generated });
        }
        placed.extend(by_statement.into_values());
        let is_implicit = !self.in_block && self.autocommit;
        if !round.parts.is_empty() {
            let finishes = (is_implicit && (ends || self.client == Dialect::MariaDb)) || commits;
            let last = if finishes {
                Last::Commit
            } else if is_last {
                Last::Marked
            } else {
                Last::No
            };
            let mut answers = self.round(round, &placed, last, finishes).await?;
            let mut found = placed.iter();
            for index in 0..batch.len() {
                if replies.get(index).is_some_and(Option::is_some) {
                    continue;
                }
                let Some(placed) = found.next() else { break };
                let reply = reply(placed, &mut answers, self.counts_found)?;
                let reply = match &placed.generated {
                    Some(generated) => self.with_generated(generated, reply),
                    None => reply,
                };
                if index < replies.len() {
                    if let Some(slot) = replies.get_mut(index) {
                        *slot = Some(reply);
                    }
                } else {
                    replies.resize(index, None);
                    replies.push(Some(reply));
                }
            }
        }
        Ok(replies.into_iter().flatten().collect())
    }

    /// Runs statements of which the one at `at` was refused with `refusal`. If its rows can be
    /// gathered, it runs by itself, after those before it.
    async fn data_around(
        &mut self,
        batch: &[(Parsed, Vec<Value>)],
        at: usize,
        refusal: SqlError,
        ends: bool,
        commits: bool,
    ) -> Result<Vec<Reply>, SqlError> {
        let (before, rest) = batch.split_at(at);
        let Some((this, after)) = rest.split_first() else { return Err(refusal) };
        if !self.is_gathered(&this.0, &this.1).await {
            return Err(refusal);
        }
        let mut replies = Vec::new();
        if !before.is_empty() {
            replies.extend(self.data(before, false, false).await?);
        }
        replies.extend(self.data(std::slice::from_ref(this), false, false).await?);
        if !after.is_empty() {
            replies.extend(self.data(after, ends, commits).await?);
        }
        Ok(replies)
    }

    /// Adds a statement's parts to a round, and returns the positions of their answers.
    pub(crate) fn place(
        &mut self,
        round: &mut Round,
        plan: &Plan,
        may_leave: bool,
        is_write: bool,
    ) -> Vec<(NodeId, usize)> {
        let mut places = Vec::new();
        for part in &plan.parts {
            let Some(&node) = self.proxy.nodes.get(&part.source) else { continue };
            if plan.is_write && self.proxy.near.is_some() {
                self.own_changes.note(part.source, &part.records);
            }
            round.orders.entry(node).or_default().push(Order {
                text: part.text.clone(),
                rows: part.records.iter().map(|r| (r.table.clone(), r.key.clone())).collect(),
                is_write,
            });
            let there = round.parts.entry(node).or_insert_with(|| Part {
                statements: Vec::new(),
                records: Vec::new(),
                writes: false,
            });
            places.push((node, there.statements.len()));
            let kind = self.proxy.catalogue.source(part.source).map(|source| source.kind);
            let is_first = there.statements.is_empty();
            there.statements.push(Statement {
                prelude: part.prelude.clone(),
                text: part.text.clone(),
                keys: part.keys.clone(),
                settings: kind
                    .filter(|_| is_first)
                    .map_or_else(Vec::new, |kind| self.settings.at(kind)),
                may_leave,
            });
            there
                .records
                .extend(part.records.iter().map(|r| Key::from(format!("{}:{}", r.table, r.key))));
            // A function that the proxy does not know may write.
            there.writes |= plan.is_write || may_leave;
        }
        places
    }

    /// Executes a change of the schema as part of the transaction.
    pub(crate) async fn change_schema(&mut self, plan: &Plan) -> Result<(), SqlError> {
        let mut round = Round::default();
        let places = self.place(&mut round, plan, true, true);
        let placed = [Placed::new(plan.clone(), "CREATE", places)];
        self.has_schema = true;
        self.round(round, &placed, Last::No, false).await.map(drop)
    }

    /// The rows of a query in the open transaction at one source, which include the transaction's
    /// own changes.
    pub(crate) async fn ask_within(
        &mut self,
        source: SourceId,
        text: String,
    ) -> Result<Answer, SqlError> {
        let part = orthodrome_geotp::sql::Part {
            source,
            prelude: Vec::new(),
            text,
            records: Vec::new(),
            keys: Keys::default(),
        };
        let (merge, is_write, has_rows) = (Merge::Only, false, true);
        let plan = Plan { parts: vec![part], merge, is_write, has_rows };
        let mut round = Round::default();
        let places = self.place(&mut round, &plan, true, false);
        let placed = [Placed::new(plan, "SELECT", places)];
        let answers = self.round(round, &placed, Last::No, false).await?;
        Ok(answers.into_values().flatten().next().unwrap_or_default())
    }

    /// The reply to an INSERT with generated keys.
    fn with_generated(&mut self, generated: &Generated, reply: Reply) -> Reply {
        let number = |cell: Option<&Option<Vec<u8>>>| -> Option<i64> {
            std::str::from_utf8(cell?.as_deref()?).ok()?.parse().ok()
        };
        let mut ends = generated.given;
        let reply = match reply {
            Reply::Rows(answer, _) if generated.is_returned => {
                let first = answer.rows.first().and_then(|row| number(row.first()));
                let last = answer.rows.last().and_then(|row| number(row.first()));
                ends = first.zip(last);
                let affected = answer.rows.len() as u64;
                Reply::Done { tag: format!("INSERT 0 {affected}"), affected, last_insert_id: 0 }
            }
            Reply::Rows(answer, verb) => {
                let is_it = |column: &Column| {
                    generated.sequence == format!("{}_{}_seq", generated.table, column.name)
                };
                let place = answer.columns.iter().position(is_it);
                let last = answer.rows.last().and_then(|row| number(row.get(place?)));
                ends = ends.or(last.zip(last));
                Reply::Rows(answer, verb)
            }
            other => other,
        };
        let Some((first, last)) = ends else { return reply };
        self.last_values.was_given(&generated.sequence, last);
        match reply {
            Reply::Done { tag, affected, last_insert_id: _ } => {
                let last_insert_id = u64::try_from(first).unwrap_or(0);
                Reply::Done { tag, affected, last_insert_id }
            }
            other => other,
        }
    }

    /// Checks that a read-only transaction does not write, and that a statement does not use the
    /// state of a session at a source. Returns whether it may change its session.
    fn check_may_run(&self, parsed: &Parsed, values: &[Value]) -> Result<bool, SqlError> {
        let Verb::Data(statement) = &parsed.verb else { return Ok(false) };
        let mut effects = effects(statement);
        if self.client == Dialect::MariaDb {
            effects.of_a_session.retain(|name| name != "last_insert_id");
        } else if effects.of_a_session.iter().any(|name| name == "set_config")
            && set_config(statement, values)?.is_some()
        {
            effects.of_a_session.clear();
        }
        self.check_effects(&effects)?;
        let word = parsed.word();
        let locks = locks_rows(statement, self.client);
        if self.is_read_only() && (word != "SELECT" || locks) {
            return Err(self.cannot_write(if locks { "SELECT FOR UPDATE" } else { word }));
        }
        Ok(effects.calls_unknown)
    }

    /// Refuses statements that would change a session at a source, which other clients use too.
    pub(crate) fn check_effects(&self, effects: &Effects) -> Result<(), SqlError> {
        let why = if let Some(name) = effects.of_a_session.first() {
            format!(
                "{name}() belongs to one session at one source, and the proxy has none for a client"
            )
        } else if let (Dialect::MariaDb, Some(name)) = (self.client, &effects.user_variable) {
            format!(
                "{name}: the proxy does not support user variables; keep the value in the client"
            )
        } else if effects.has_into {
            "SELECT … INTO is not supported; create the table, then use INSERT … SELECT".to_owned()
        } else if let (Engine::ByKey(_), true) = (&self.proxy.engine, effects.calls_unknown) {
            "the `mode` of this proxy calls only functions of which it knows that they change nothing"
                .to_owned()
        } else {
            return Ok(());
        };
        Err(SqlError::new("0A000", why))
    }

    /// The error for a write in a read-only transaction.
    pub(crate) fn cannot_write(&self, what: &str) -> SqlError {
        match self.client {
            Dialect::PostgreSql => {
                SqlError::new("25006", format!("cannot execute {what} in a read-only transaction"))
            }
            Dialect::MariaDb => {
                SqlError::new("25006", "Cannot execute statement in a READ ONLY transaction")
            }
        }
    }

    pub(crate) async fn commit(&mut self) -> Result<Reply, SqlError> {
        let was_open = self.in_transaction();
        self.in_block = false;
        if std::mem::take(&mut self.is_failed) {
            self.end().await;
            self.over(false);
            if self.client == Dialect::MariaDb {
                return Err(rolled_back_before());
            }
            return Ok(Reply::done("ROLLBACK"));
        }
        if self.open.is_none() && !self.deferred.is_empty() {
            return self.commit_remembered().await;
        }
        let Some(mut open) = self.open.take() else {
            // At PostgreSQL the rest of a batch is a transaction without BEGIN.
            if was_open || self.client == Dialect::PostgreSql {
                self.over(true);
            }
            return Ok(Reply::done("COMMIT"));
        };
        self.proxy.engine.commit(open.xid);
        while let Some(heard) = open.hearing.recv().await {
            if let Heard::Finished(outcome, failure) = heard {
                self.over(matches!(outcome, Outcome::Committed(_)));
                return match outcome {
                    Outcome::Committed(_) => Ok(Reply::done("COMMIT")),
                    outcome @ (Outcome::Aborted(_) | Outcome::Unknown) => {
                        Err(self.ended(outcome, failure, open.touched.len()))
                    }
                };
            }
        }
        Err(SqlError::new("08007", "the proxy stopped; the outcome of the transaction is unknown"))
    }

    /// Runs statements that are not about rows.
    async fn other(&mut self, parsed: &Parsed, values: &[Value]) -> Result<Reply, SqlError> {
        match &parsed.verb {
            Verb::Begin(changes) => {
                self.check_failed()?;
                if self.client == Dialect::MariaDb {
                    // MySQL commits the open transaction.
                    self.commit().await?;
                }
                self.settings.begin();
                for change in changes {
                    self.set_of_transaction(change)?;
                }
                self.in_block = true;
                Ok(Reply::done("BEGIN"))
            }
            Verb::Commit { chain } => {
                let kept = chain.then(|| self.characteristics());
                let reply = self.commit().await?;
                self.next(kept);
                Ok(reply)
            }
            Verb::Rollback { chain } => {
                let kept = chain.then(|| self.characteristics());
                self.end().await;
                self.is_failed = false;
                self.over(false);
                self.next(kept);
                Ok(Reply::done("ROLLBACK"))
            }
            Verb::Savepoint(what, name) => {
                // What happened before the savepoint must have happened at the sources.
                self.send_remembered().await?;
                self.savepoint(*what, name)
            }
            _ => {
                self.check_failed()?;
                self.setting(parsed, values).await
            }
        }
    }

    /// The properties that a chained transaction inherits: its isolation level and access mode.
    fn characteristics(&self) -> (Isolation, bool) {
        (self.open_isolation(), self.is_read_only())
    }

    /// Ends a transaction, and begins a chained one with the `kept` properties, if there are any.
    fn next(&mut self, kept: Option<(Isolation, bool)>) {
        self.settings.begin();
        self.in_block = kept.is_some();
        if let Some((isolation, is_read_only)) = kept {
            (self.next_isolation, self.read_only) = (Some(isolation), Some(is_read_only));
        }
    }

    pub(crate) async fn setting(
        &mut self,
        parsed: &Parsed,
        values: &[Value],
    ) -> Result<Reply, SqlError> {
        match &parsed.verb {
            Verb::Set(changes) => self.set(changes).await,
            Verb::Reset(name) => self.reset_setting(name.as_deref()).await,
            Verb::Show(name) => self.show(name, parsed).await,
            Verb::Use(_) if self.client == Dialect::PostgreSql => {
                Err(SqlError::new("42601", "syntax error at or near \"USE\""))
            }
            Verb::Use(name) => {
                self.check_database(name)?;
                Ok(Reply::done("USE"))
            }
            Verb::Schema(_) => self.schema(parsed, values).await,
            Verb::Explain(inner) => self.explain(inner, values).await,
            Verb::Admin(words) => self.admin(words).await,
            Verb::DiscardAll if self.in_block => {
                Err(SqlError::new("25001", "DISCARD ALL cannot run inside a transaction block"))
            }
            Verb::DiscardAll => {
                self.reset().await;
                Ok(Reply::done("DISCARD ALL"))
            }
            // The listener removes those of its protocol.
            Verb::Deallocate(None) => {
                self.prepared.clear();
                Ok(Reply::done("DEALLOCATE ALL"))
            }
            Verb::Deallocate(Some(name)) => {
                self.prepared.remove(name);
                Ok(Reply::done("DEALLOCATE"))
            }
            Verb::Prepare(name, parsed) => self.prepare(name, parsed),
            Verb::Execute(name, values) => {
                let batch = [self.executed(name, values)?];
                let reply = match batch {
                    [(Parsed { verb: Verb::Data(_), .. }, _)] => {
                        Box::pin(self.data(&batch, false, false)).await?.pop()
                    }
                    [(parsed, values)] => {
                        let answer = Box::pin(self.elsewhere(&parsed, &values)).await?;
                        Some(Reply::Rows(answer, "SELECT"))
                    }
                };
                reply.ok_or_else(|| SqlError::new("XX000", "a prepared statement had no answer"))
            }
            Verb::Declare { name, query, is_held } => self.declare(name, query, *is_held).await,
            Verb::Fetch { name, motion, is_move } => self.fetch(name, *motion, *is_move),
            Verb::Close(name) => self.close(name.as_deref()),
            Verb::Housekeeping(tag) => Ok(Reply::done(tag)),
            Verb::Copy { .. } | Verb::CopyOut { .. } => Err(SqlError::new(
                "0A000",
                "COPY must be the only statement of its batch, in the simple protocol",
            )),
            Verb::Other => {
                self.elsewhere(parsed, values).await.map(|answer| Reply::Rows(answer, "SELECT"))
            }
            Verb::Data(_)
            | Verb::Begin(_)
            | Verb::Commit { .. }
            | Verb::Rollback { .. }
            | Verb::Savepoint(..)
            | Verb::Empty => Err(SqlError::new("XX000", "a statement was misplaced")),
        }
    }
}

/// Maximum length of a statement that is searched for functions of generated keys.
const SEARCHED_MAX: usize = 10_000;

/// Whether a statement uses keys that an earlier statement may have generated.
fn asks_for_keys(parsed: &Parsed) -> bool {
    if parsed.text.len() > SEARCHED_MAX {
        return false;
    }
    let lower = parsed.text.to_lowercase();
    ["lastval", "currval", "nextval", "last_insert_id"].iter().any(|name| lower.contains(name))
}

/// A statement's reply, from the answers of its round. `counts_found`: rows that an UPDATE found and
/// left as they were count.
pub(crate) fn reply(
    placed: &Placed,
    answers: &mut OrdMap<NodeId, Vec<Answer>>,
    counts_found: bool,
) -> Result<Reply, SqlError> {
    let mut own = Vec::new();
    for (node, place) in &placed.places {
        let answer =
            answers.get_mut(node).and_then(|answers| answers.get_mut(*place)).map(std::mem::take);
        own.push(answer.ok_or_else(|| {
            SqlError::new("XX000", "a source answered fewer statements than it was sent")
        })?);
    }
    let how = if own.len() == 1 { &Merge::Only } else { &placed.plan.merge };
    let how = if matches!(placed.plan.merge, Merge::Rows(_)) { &placed.plan.merge } else { how };
    let answer = merge(how, own)?;
    if placed.plan.has_rows {
        return Ok(Reply::Rows(answer, placed.verb));
    }
    let unchanged = if counts_found { 0 } else { answer.unchanged };
    let count = answer.affected.saturating_sub(unchanged);
    let tag = if placed.verb == "INSERT" {
        format!("INSERT 0 {count}")
    } else {
        format!("{} {count}", placed.verb)
    };
    Ok(Reply::Done { tag, affected: count, last_insert_id: answer.last_insert_id })
}
