//! One client's session, whatever protocol it speaks: statements become rounds of a transaction.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use orthodrome_core::txn::Key;
use orthodrome_core::{NodeId, Outcome};
use orthodrome_geotp::contract::{self, Failure, Last, Part, Reason, Xid};
use orthodrome_geotp::middleware::Optimizations;
use orthodrome_geotp::sql::merge::{Merge, merge};
use orthodrome_geotp::sql::{
    Answer, Catalogue, Column, Context, Dialect, Isolation, Kind, Parsed, Plan, Refusal, SourceId,
    Value, Verb, deletes, parse, plan,
};
use tokio::sync::{Notify, mpsc};

use super::consensus::{Consensus, Order};
use super::driver::{Fault, Sql, Statement, Trouble};
use super::host::{Heard, MiddlewareHost};
use super::settings;
use super::source::Source;
use super::words::translated;

/// What all sessions share.
pub(super) struct Proxy {
    pub(super) catalogue: Catalogue,
    /// The name of each source's node.
    pub(super) nodes: BTreeMap<SourceId, NodeId>,
    /// Nearest first.
    pub(super) by_distance: Vec<SourceId>,
    /// For what is no part of a transaction: changes of the schema, sources' own catalogues.
    pub(super) direct: BTreeMap<SourceId, Arc<Source>>,
    pub(super) engine: Engine,
    pub(super) isolation: Isolation,
    /// Statements of a round that write go last (QURO).
    pub(super) writes_last: bool,
    /// What clients may call the database.
    pub(super) databases: BTreeSet<String>,
}

/// What makes transactions of rounds.
pub(super) enum Engine {
    /// Branches at sources that commit together: GeoTP, and the baselines that use XA.
    Xa(MiddlewareHost),
    /// Single records: ScalarDB.
    ByKey(Consensus),
}

impl Engine {
    async fn begin(&self, isolation: Isolation) -> Option<(Xid, mpsc::UnboundedReceiver<Heard>)> {
        match self {
            Self::Xa(middleware) => middleware.begin(level(isolation)).await,
            Self::ByKey(consensus) => consensus.begin().await,
        }
    }

    fn round(&self, xid: Xid, round: Round, last: Last) {
        match self {
            Self::Xa(middleware) => middleware.round(xid, round.parts, last),
            Self::ByKey(consensus) => consensus.round(xid, round.orders, last),
        }
    }

    fn commit(&self, xid: Xid) {
        match self {
            Self::Xa(middleware) => middleware.commit(xid),
            Self::ByKey(consensus) => consensus.commit(xid),
        }
    }

    fn rollback(&self, xid: Xid) {
        match self {
            Self::Xa(middleware) => middleware.rollback(xid),
            Self::ByKey(consensus) => consensus.rollback(xid),
        }
    }

    fn cancel(&self, xid: Xid) {
        match self {
            Self::Xa(middleware) => middleware.cancel(xid),
            Self::ByKey(consensus) => consensus.rollback(xid),
        }
    }

    fn notes(&self) -> BTreeMap<String, u64> {
        fn named<N: std::fmt::Debug>(notes: BTreeMap<N, u64>) -> BTreeMap<String, u64> {
            notes.into_iter().map(|(note, count)| (format!("{note:?}"), count)).collect()
        }
        match self {
            Self::Xa(middleware) => named(middleware.notes()),
            Self::ByKey(consensus) => named(consensus.notes()),
        }
    }

    fn xa(&self) -> Result<&MiddlewareHost, SqlError> {
        match self {
            Self::Xa(middleware) => Ok(middleware),
            Self::ByKey(_) => Err(SqlError::new(
                "0A000",
                "the `mode` of this proxy does not support this; use another `mode` in its configuration file",
            )),
        }
    }
}

/// What sources are to do in a round.
#[derive(Clone, Default)]
struct Round {
    parts: BTreeMap<NodeId, Part<Sql>>,
    orders: BTreeMap<NodeId, Vec<Order>>,
}

/// What a client is told is wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct SqlError {
    pub(super) sqlstate: String,
    pub(super) number: u16,
    pub(super) message: String,
}

impl SqlError {
    pub(super) fn new(sqlstate: &str, message: impl Into<String>) -> Self {
        Self { sqlstate: sqlstate.into(), number: number_of(sqlstate), message: message.into() }
    }
}

impl From<Refusal> for SqlError {
    fn from(refusal: Refusal) -> Self {
        Self::new(refusal.sqlstate, refusal.message)
    }
}

impl From<Fault> for SqlError {
    fn from(fault: Fault) -> Self {
        let (mut sqlstate, mut number) = (fault.sqlstate, fault.number);
        if number == 1205 {
            sqlstate = "55P03".into();
        }
        if number == 0 {
            number = number_of(&sqlstate);
        }
        Self { sqlstate, number, message: fault.message }
    }
}

impl From<Trouble> for SqlError {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Fault(fault) => fault.into(),
            Trouble::Broken(error) => {
                Self::new("08006", format!("the source cannot be reached: {error}; try again"))
            }
        }
    }
}

/// MariaDB's number for a SQLSTATE of PostgreSQL.
fn number_of(sqlstate: &str) -> u16 {
    match sqlstate {
        "23505" => 1062,
        "23503" => 1452,
        "23502" => 1048,
        "40P01" | "40001" => 1213,
        "55P03" => 1205,
        "42P01" => 1146,
        "42703" => 1054,
        "42601" => 1064,
        "28000" | "28P01" => 1045,
        "57014" => 1317,
        "0A000" => 1235,
        _ => 1105,
    }
}

/// What a statement came to.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Reply {
    /// Rows, with the verb for PostgreSQL's tag.
    Rows(Answer, &'static str),
    /// No rows: the tag, and what MySQL wants to know.
    Done { tag: String, affected: u64, last_insert_id: u64 },
    /// It failed. Nothing of the same text follows.
    Error(SqlError),
}

impl Reply {
    fn done(tag: &str) -> Self {
        Self::Done { tag: tag.to_owned(), affected: 0, last_insert_id: 0 }
    }
}

struct Open {
    xid: Xid,
    hearing: mpsc::UnboundedReceiver<Heard>,
    isolation: Isolation,
    touched: BTreeSet<SourceId>,
}

/// How often a transaction's first round is sent.
const TRIES: u32 = 8;

/// Why a round came to nothing.
struct Missed {
    error: SqlError,
    /// It lost to another transaction, and is rolled back.
    lost: bool,
}

impl From<SqlError> for Missed {
    fn from(error: SqlError) -> Self {
        Self { error, lost: false }
    }
}

/// A client's session.
pub(super) struct Session {
    proxy: Arc<Proxy>,
    client: Dialect,
    session_isolation: Isolation,
    next_isolation: Option<Isolation>,
    autocommit: bool,
    /// BEGIN was said, and neither COMMIT nor ROLLBACK.
    in_block: bool,
    /// PostgreSQL: the transaction failed and its end has not come.
    is_failed: bool,
    open: Option<Open>,
    settings: BTreeMap<String, String>,
    /// Told when the client wants what runs to be cancelled.
    pub(super) cancelled: Arc<Notify>,
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(open) = &self.open {
            self.proxy.engine.rollback(open.xid);
        }
    }
}

/// One client statement within a round.
struct Placed {
    plan: Plan,
    verb: &'static str,
    /// Where each part's answer will be: the source and its place there.
    places: Vec<(NodeId, usize)>,
}

fn level(isolation: Isolation) -> contract::Isolation {
    match isolation {
        Isolation::Serializable => contract::Isolation::Serializable,
        Isolation::RepeatableRead => contract::Isolation::RepeatableRead,
        Isolation::ReadCommitted => contract::Isolation::ReadCommitted,
    }
}

fn text_answer(name: &str, lines: impl IntoIterator<Item = String>) -> Answer {
    table(&[name], lines.into_iter().map(|line| vec![line]))
}

fn table(names: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> Answer {
    let columns = names
        .iter()
        .map(|name| Column { name: (*name).to_owned(), kind: Kind::Text, oid: 25 })
        .collect();
    let rows: Vec<Vec<_>> = rows
        .into_iter()
        .map(|row| row.into_iter().map(|cell| Some(cell.into_bytes())).collect())
        .collect();
    Answer { columns, affected: rows.len() as u64, rows, last_insert_id: 0 }
}

impl Session {
    pub(super) fn new(proxy: Arc<Proxy>, client: Dialect) -> Self {
        Self {
            session_isolation: proxy.isolation,
            proxy,
            client,
            next_isolation: None,
            autocommit: true,
            in_block: false,
            is_failed: false,
            open: None,
            settings: BTreeMap::new(),
            cancelled: Arc::default(),
        }
    }

    /// Checks that the proxy's database has this name. MySQL's clients need not name one.
    pub(super) fn check_database(&self, name: &str) -> Result<(), SqlError> {
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
            },
        })
    }

    /// Checks that there is such a setting.
    async fn check_setting(&self, name: &str) -> Result<(), SqlError> {
        if settings::is_known(self.client, name) {
            return Ok(());
        }
        if self.client == Dialect::MariaDb && name.starts_with('@') {
            return Err(SqlError::new(
                "0A000",
                format!(
                    "{name}: the proxy does not support user variables; keep the value in the client"
                ),
            ));
        }
        // What a source of the client's kind knows, its clients may set.
        if let Some((home, kind)) = self.home()
            && kind == self.client
            && let Some(source) = self.proxy.direct.get(&home)
        {
            let outcome = source.ask(&settings::asking_for(kind, name)).await?;
            if let Some(fault) = outcome.fault {
                return Err(fault.into());
            }
            if outcome.done.iter().any(|(answer, _)| !answer.rows.is_empty()) {
                return Ok(());
            }
        }
        Err(match self.client {
            Dialect::PostgreSql => {
                SqlError::new("42704", format!("unrecognized configuration parameter \"{name}\""))
            }
            Dialect::MariaDb => SqlError {
                sqlstate: "HY000".into(),
                number: 1193,
                message: format!("Unknown system variable '{name}'"),
            },
        })
    }

    /// PostgreSQL's state of the transaction.
    pub(super) fn status(&self) -> u8 {
        match (self.is_failed, self.in_block) {
            (true, _) => b'E',
            (false, true) => b'T',
            (false, false) => b'I',
        }
    }

    pub(super) fn is_autocommit(&self) -> bool {
        self.autocommit
    }

    /// A transaction is open that the client must end.
    pub(super) fn in_transaction(&self) -> bool {
        self.in_block || self.open.is_some()
    }

    pub(super) async fn reset(&mut self) {
        self.end().await;
        self.in_block = false;
        self.is_failed = false;
        self.autocommit = true;
        self.next_isolation = None;
        self.session_isolation = self.proxy.isolation;
        self.settings.clear();
    }

    fn isolation(&self) -> Isolation {
        self.next_isolation.unwrap_or(self.session_isolation)
    }

    /// Carries out the statements of one text, or of one pipeline. The last reply is an error if one failed.
    pub(super) async fn run(&mut self, statements: &[(Parsed, Vec<Value>)]) -> Vec<Reply> {
        let mut replies = Vec::new();
        let mut at = 0;
        while let Some((parsed, values)) = statements.get(at) {
            let count = self.batch(statements.get(at..).unwrap_or_default());
            let found = if count > 0 {
                let batch = statements.get(at..at + count).unwrap_or_default();
                at += count;
                // In PostgreSQL a text of several statements is one transaction.
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
                Ok(more) => replies.extend(more),
                Err(error) => {
                    self.fail().await;
                    replies.push(Reply::Error(error));
                    return replies;
                }
            }
        }
        if self.client == Dialect::PostgreSql && !self.in_block && self.open.is_some() {
            // Something else than rows was last in a text without BEGIN.
            if let Err(error) = self.commit().await {
                replies.pop();
                replies.push(Reply::Error(error));
            }
        }
        replies
    }

    /// How many of these statements can go in one round.
    fn batch(&self, statements: &[(Parsed, Vec<Value>)]) -> usize {
        let data = statements.iter().take_while(|(parsed, _)| matches!(parsed.verb, Verb::Data(_)));
        let mut count = 0;
        for (parsed, _) in data {
            count += 1;
            // MySQL commits each statement of a text by itself.
            if parsed.is_last
                || (self.client == Dialect::MariaDb && self.autocommit && !self.in_block)
            {
                break;
            }
        }
        count
    }

    /// After an error: PostgreSQL's transaction is over but for its end.
    pub(super) async fn fail(&mut self) {
        if self.client == Dialect::PostgreSql {
            self.is_failed = self.in_block;
            self.end().await;
        }
    }

    /// Rolls back what is open, if anything.
    async fn end(&mut self) {
        if let Some(mut open) = self.open.take() {
            self.proxy.engine.rollback(open.xid);
            while let Some(heard) = open.hearing.recv().await {
                if matches!(heard, Heard::Finished(..)) {
                    break;
                }
            }
        }
    }

    pub(super) fn check_failed(&self) -> Result<(), SqlError> {
        if self.is_failed {
            return Err(SqlError::new(
                "25P02",
                "current transaction is aborted, commands ignored until end of transaction block",
            ));
        }
        Ok(())
    }

    fn prefer(&self) -> Vec<SourceId> {
        let touched = self.open.iter().flat_map(|open| open.touched.iter().copied());
        touched.chain(self.proxy.by_distance.iter().copied()).collect()
    }

    fn planned(&self, parsed: &Parsed, values: &[Value]) -> Result<Plan, SqlError> {
        let (Verb::Data(statement) | Verb::Schema(statement)) = &parsed.verb else {
            return Err(SqlError::new("XX000", "internal error: the statement has no plan"));
        };
        let isolation = self.open.as_ref().map_or_else(|| self.isolation(), |open| open.isolation);
        let by_key = matches!(self.proxy.engine, Engine::ByKey(_));
        // It locks nothing at sources.
        let isolation = if by_key { Isolation::ReadCommitted } else { isolation };
        let context = Context { client: self.client, isolation, prefer: self.prefer(), by_key };
        Ok(plan(&self.proxy.catalogue, statement, values, &context)?)
    }

    /// Statements that read or change rows, in one round.
    async fn data(
        &mut self,
        batch: &[(Parsed, Vec<Value>)],
        ends: bool,
        commits: bool,
    ) -> Result<Vec<Reply>, SqlError> {
        self.check_failed()?;
        let mut placed: Vec<Placed> = Vec::new();
        let mut round = Round::default();
        let mut replies: Vec<Option<Reply>> = Vec::new();
        let mut is_last = false;
        let mut order: Vec<usize> = (0..batch.len()).collect();
        let mut plans = Vec::new();
        for (parsed, values) in batch {
            is_last |= parsed.is_last;
            plans.push(self.planned(parsed, values)?);
        }
        if self.proxy.writes_last {
            order.sort_by_key(|&index| plans.get(index).is_some_and(|plan| plan.is_write));
        }
        let mut by_statement: BTreeMap<usize, Placed> = BTreeMap::new();
        for index in order {
            let (Some(plan), Some((parsed, values))) = (plans.get(index), batch.get(index)) else {
                continue;
            };
            if plan.parts.is_empty() {
                let answer = self.elsewhere(parsed, values).await?;
                replies.resize(index, None);
                replies.push(Some(Reply::Rows(answer, "SELECT")));
                continue;
            }
            let mut places = Vec::new();
            for part in &plan.parts {
                let Some(&node) = self.proxy.nodes.get(&part.source) else { continue };
                round.orders.entry(node).or_default().push(Order {
                    text: part.text.clone(),
                    rows: part.records.iter().map(|r| (r.table.clone(), r.key.clone())).collect(),
                    is_write: parsed.word() != "SELECT",
                });
                let there = round.parts.entry(node).or_insert_with(|| Part {
                    statements: Vec::new(),
                    records: Vec::new(),
                    writes: false,
                });
                places.push((node, there.statements.len()));
                there.statements.push(Statement {
                    prelude: part.prelude.clone(),
                    text: part.text.clone(),
                    keys: part.keys.clone(),
                });
                there.records.extend(
                    part.records.iter().map(|r| Key(Bytes::from(format!("{}:{}", r.table, r.key)))),
                );
                there.writes |= plan.is_write;
            }
            by_statement.insert(index, Placed { plan: plan.clone(), verb: parsed.word(), places });
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
                let reply = reply(placed, &mut answers)?;
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

    /// Sends a round, again if it was the transaction's first and it lost to another transaction: its client
    /// has seen nothing of it.
    async fn round(
        &mut self,
        round: Round,
        placed: &[Placed],
        last: Last,
        finishes: bool,
    ) -> Result<BTreeMap<NodeId, Vec<Answer>>, SqlError> {
        let is_first = self.open.is_none();
        let isolation = self.isolation();
        for _ in 1..TRIES {
            match self.attempt(round.clone(), placed, last, finishes).await {
                Ok(answers) => return Ok(answers),
                Err(missed) if !(is_first && missed.lost) => return Err(self.missed(missed)),
                Err(_) => self.next_isolation = Some(isolation),
            }
        }
        let missed = self.attempt(round, placed, last, finishes).await;
        missed.map_err(|missed| self.missed(missed))
    }

    /// What the client hears. MySQL's transaction is over with a failure that rolled it back.
    fn missed(&mut self, missed: Missed) -> SqlError {
        if self.client == Dialect::MariaDb && self.open.is_none() {
            self.in_block = false;
        }
        missed.error
    }

    /// Sends a round and waits for what comes of it.
    async fn attempt(
        &mut self,
        round: Round,
        placed: &[Placed],
        last: Last,
        finishes: bool,
    ) -> Result<BTreeMap<NodeId, Vec<Answer>>, Missed> {
        if self.open.is_none() {
            let isolation = self.isolation();
            self.next_isolation = None;
            let begun = self.proxy.engine.begin(isolation).await;
            let (xid, hearing) =
                begun.ok_or_else(|| SqlError::new("57P01", "the proxy is shutting down"))?;
            self.open = Some(Open { xid, hearing, isolation, touched: BTreeSet::new() });
        }
        let several = placed.len() > 1 || round.parts.len() > 1 || finishes;
        let proxy = self.proxy.clone();
        let cancelled = self.cancelled.clone();
        let client = self.client;
        let Some(open) = self.open.as_mut() else {
            return Err(SqlError::new("XX000", "internal error: no transaction is open").into());
        };
        open.touched
            .extend(placed.iter().flat_map(|p| p.plan.parts.iter().map(|part| part.source)));
        let (xid, sources) = (open.xid, open.touched.len());
        proxy.engine.round(xid, round, last);
        let mut answers = None;
        let mut is_cancelled = false;
        loop {
            let heard = tokio::select! {
                heard = open.hearing.recv() => heard,
                () = cancelled.notified(), if !is_cancelled => {
                    is_cancelled = true;
                    proxy.engine.cancel(xid);
                    continue;
                }
            };
            match heard {
                None => {
                    self.open = None;
                    let why = "the proxy stopped; the outcome of the transaction is unknown";
                    return Err(SqlError::new("08007", why).into());
                }
                Some(Heard::Answers(found)) => {
                    if !finishes {
                        return Ok(found);
                    }
                    answers = Some(found);
                }
                Some(Heard::StatementFailed(source, failure)) => {
                    let error = self.error(source, failure, sources);
                    if several || client == Dialect::PostgreSql {
                        self.end().await;
                        self.in_block = self.in_block && client == Dialect::PostgreSql;
                    }
                    return Err(error.into());
                }
                Some(Heard::Finished(outcome, failure)) => {
                    self.open = None;
                    if let (Outcome::Committed(_), Some(answers)) = (outcome, answers.take()) {
                        return Ok(answers);
                    }
                    if is_cancelled && matches!(outcome, Outcome::Aborted(_)) {
                        let why = "canceling statement due to user request";
                        return Err(SqlError::new("57014", why).into());
                    }
                    let lost = matches!(outcome, Outcome::Aborted(_))
                        && failure.as_ref().is_some_and(|(_, failure)| {
                            matches!(
                                failure.reason,
                                Reason::Serialization | Reason::Deadlock | Reason::Peer
                            )
                        });
                    return Err(Missed { error: self.ended(outcome, failure, sources), lost });
                }
            }
        }
    }

    fn source_name(&self, node: NodeId) -> String {
        let found = self.proxy.nodes.iter().find(|(_, n)| **n == node);
        found
            .and_then(|(id, _)| self.proxy.catalogue.source(*id))
            .map_or_else(|| node.to_string(), |s| s.name.clone())
    }

    /// What is told of a failure at a source, of a transaction that is at as many.
    fn error(&self, source: NodeId, failure: Failure<Sql>, sources: usize) -> SqlError {
        if let Some(fault) = failure.fault {
            let mut error = translated(fault, self.client, &self.source_name(source));
            if failure.reason == Reason::LockTimeout && sources > 1 {
                // Where nobody looks for deadlocks across sources they end so, and are answered like others.
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
                ("40001", format!("the connection to source {name} broke"))
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
            Reason::Timeout => ("40001", format!("source {name} did not answer in time")),
            reason => ("40001", format!("source {name}: {reason:?}")),
        };
        SqlError::new(sqlstate, format!("transaction rolled back: {why}; try again"))
    }

    fn ended(
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

    async fn commit(&mut self) -> Result<Reply, SqlError> {
        self.in_block = false;
        if std::mem::take(&mut self.is_failed) {
            self.end().await;
            return Ok(Reply::done("ROLLBACK"));
        }
        let Some(mut open) = self.open.take() else { return Ok(Reply::done("COMMIT")) };
        self.proxy.engine.commit(open.xid);
        while let Some(heard) = open.hearing.recv().await {
            if let Heard::Finished(outcome, failure) = heard {
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

    /// Everything that is not about rows.
    async fn other(&mut self, parsed: &Parsed, values: &[Value]) -> Result<Reply, SqlError> {
        match &parsed.verb {
            Verb::Begin { isolation, .. } => {
                self.check_failed()?;
                if self.client == Dialect::MariaDb {
                    // MySQL commits what is open.
                    self.commit().await?;
                }
                self.in_block = true;
                if isolation.is_some() && self.open.is_none() {
                    self.next_isolation = *isolation;
                }
                Ok(Reply::done("BEGIN"))
            }
            Verb::Commit { chain } => {
                let reply = self.commit().await?;
                self.in_block = *chain;
                Ok(reply)
            }
            Verb::Rollback { chain } => {
                self.end().await;
                self.is_failed = false;
                self.in_block = *chain;
                self.next_isolation = None;
                Ok(Reply::done("ROLLBACK"))
            }
            _ => {
                self.check_failed()?;
                self.setting(parsed, values).await
            }
        }
    }

    async fn setting(&mut self, parsed: &Parsed, values: &[Value]) -> Result<Reply, SqlError> {
        match &parsed.verb {
            Verb::Isolation { level, is_session } => {
                if !is_session && self.open.is_some() {
                    return Err(SqlError::new(
                        "25001",
                        "the isolation level must be set before any query of the transaction",
                    ));
                }
                if *is_session {
                    self.session_isolation = *level;
                } else {
                    self.next_isolation = Some(*level);
                }
                Ok(Reply::done("SET"))
            }
            Verb::Autocommit(is) => {
                if *is && !self.autocommit {
                    self.commit().await?;
                }
                self.autocommit = *is;
                Ok(Reply::done("SET"))
            }
            Verb::Set(name, value) => {
                if name == "orthodrome" || name.starts_with("orthodrome.") {
                    return self.admin(&["alter".into(), "set".into(), value.clone()]).await;
                }
                self.check_setting(name).await?;
                self.settings.insert(name.clone(), value.clone());
                Ok(Reply::done("SET"))
            }
            Verb::Several(names) => {
                for name in names {
                    self.check_setting(name).await?;
                }
                Ok(Reply::done("SET"))
            }
            Verb::Reset(None) => {
                self.settings.clear();
                Ok(Reply::done("RESET"))
            }
            Verb::Reset(Some(name)) => {
                self.check_setting(name).await?;
                self.settings.remove(name);
                Ok(Reply::done("RESET"))
            }
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
            Verb::Housekeeping(tag) => {
                if *tag == "DISCARD ALL" {
                    self.reset().await;
                }
                Ok(Reply::done(tag))
            }
            Verb::Savepoint(..) => Err(SqlError::new(
                "0A000",
                "savepoints are not supported: a failed branch ends its transaction; begin a new transaction",
            )),
            Verb::Copy { .. } => Err(SqlError::new(
                "0A000",
                "COPY must be the only statement of its batch, in the simple protocol",
            )),
            Verb::Other => {
                self.elsewhere(parsed, values).await.map(|answer| Reply::Rows(answer, "SELECT"))
            }
            Verb::Data(_)
            | Verb::Begin { .. }
            | Verb::Commit { .. }
            | Verb::Rollback { .. }
            | Verb::Empty => Err(SqlError::new("XX000", "a statement was misplaced")),
        }
    }

    async fn show(&mut self, name: &str, parsed: &Parsed) -> Result<Reply, SqlError> {
        if matches!(name, "transaction_isolation" | "default_transaction_isolation") {
            let isolation =
                self.open.as_ref().map_or_else(|| self.isolation(), |open| open.isolation);
            return Ok(Reply::Rows(text_answer(name, [isolation.name().to_lowercase()]), "SHOW"));
        }
        if let Some(value) = self.settings.get(name) {
            return Ok(Reply::Rows(text_answer(name, [value.clone()]), "SHOW"));
        }
        self.elsewhere(parsed, &[]).await.map(|answer| Reply::Rows(answer, "SHOW"))
    }

    /// A source of the client's kind, or any.
    fn home(&self) -> Option<(SourceId, Dialect)> {
        let kind = |id: &SourceId| self.proxy.catalogue.source(*id).map(|s| (*id, s.kind));
        let mut all = self.proxy.by_distance.iter().filter_map(kind);
        all.find(|(_, kind)| *kind == self.client)
            .or_else(|| self.proxy.by_distance.iter().find_map(kind))
    }

    /// Answered by a source, outside of every transaction: what concerns no table of the catalogue.
    async fn elsewhere(&mut self, parsed: &Parsed, values: &[Value]) -> Result<Answer, SqlError> {
        let lower = parsed.text.to_lowercase();
        if self.client == Dialect::MariaDb
            && let Some(answer) = self.variable(&lower)
        {
            return Ok(answer);
        }
        let (home, kind) =
            self.home().ok_or_else(|| SqlError::new("08006", "no source is configured"))?;
        let mut at = home;
        let text = match &parsed.verb {
            Verb::Data(statement) => {
                let mut statement = (**statement).clone();
                orthodrome_geotp::sql::dialect::bind(&mut statement, values, kind)?;
                orthodrome_geotp::sql::dialect::translate(
                    &mut statement,
                    self.client,
                    kind,
                    &self.proxy.catalogue,
                )?;
                orthodrome_geotp::sql::dialect::render(&statement, self.client, kind)
            }
            _ => {
                let first = lower.split_whitespace().next().unwrap_or_default();
                let is_metadata = matches!(first, "show" | "desc" | "describe");
                let words = lower.split(|c: char| !(c.is_alphanumeric() || c == '_'));
                let table = words.filter_map(|word| self.proxy.catalogue.table(word)).next();
                if let Some(table) = table {
                    if !is_metadata {
                        return Err(SqlError::new(
                            "0A000",
                            format!(
                                "the proxy cannot parse this statement about \"{}\"; use simpler SQL",
                                table.name
                            ),
                        ));
                    }
                    let kind_of = |id: &SourceId| self.proxy.catalogue.source(*id).map(|s| s.kind);
                    at = table
                        .sources()
                        .into_iter()
                        .find(|id| kind_of(id) == Some(self.client))
                        .unwrap_or(home);
                }
                if !is_metadata && !matches!(first, "select" | "with" | "table" | "explain") {
                    return Err(SqlError::new(
                        "0A000",
                        format!(
                            "the proxy does not support this statement; send it to a source directly: {}",
                            parsed.text.chars().take(100).collect::<String>()
                        ),
                    ));
                }
                if self.proxy.catalogue.source(at).map(|s| s.kind) != Some(self.client) {
                    return Err(SqlError::new(
                        "0A000",
                        format!(
                            "no {} source is configured, so the proxy cannot answer this",
                            self.client
                        ),
                    ));
                }
                parsed.text.clone()
            }
        };
        let source = self
            .proxy
            .direct
            .get(&at)
            .ok_or_else(|| SqlError::new("08006", "no source is configured"))?;
        let outcome = source.ask(&text).await?;
        match outcome.fault {
            Some(fault) => Err(fault.into()),
            None => {
                Ok(outcome.done.into_iter().next().map(|(answer, _)| answer).unwrap_or_default())
            }
        }
    }

    /// MySQL's variables of the session that are the proxy's.
    fn variable(&self, lower: &str) -> Option<Answer> {
        let name = lower.strip_prefix("select ")?.trim().strip_prefix("@@")?;
        let bare = name.strip_prefix("session.").unwrap_or(name);
        let value = match bare {
            "tx_isolation" | "transaction_isolation" => self.isolation().name().replace(' ', "-"),
            "autocommit" => u8::from(self.autocommit).to_string(),
            "version_comment limit 1" | "version_comment" => "Orthodrome".to_owned(),
            _ => return None,
        };
        Some(text_answer(&format!("@@{}", name.trim_end_matches(" limit 1")), [value]))
    }

    async fn schema(&mut self, parsed: &Parsed, values: &[Value]) -> Result<Reply, SqlError> {
        if let (true, Verb::Schema(statement)) = (self.in_block, &parsed.verb)
            && let Some(deletes) = deletes(statement)?
        {
            let deletes = parse(&deletes.join(";"), self.client)?;
            let batch: Vec<_> = deletes.into_iter().map(|parsed| (parsed, Vec::new())).collect();
            self.data(&batch, false, false).await?;
            return Ok(Reply::done("TRUNCATE TABLE"));
        }
        if self.client == Dialect::MariaDb {
            self.commit().await?;
        } else if self.in_block {
            return Err(SqlError::new(
                "25001",
                "a schema change cannot be part of a distributed transaction; send it outside of a transaction",
            ));
        }
        if let (Engine::ByKey(_), Verb::Schema(statement)) = (&self.proxy.engine, &parsed.verb)
            && deletes(statement)?.is_some()
        {
            return Err(SqlError::new(
                "0A000",
                "TRUNCATE would empty records that have versions; delete rows by their keys, or choose another `mode`",
            ));
        }
        let plan = self.planned(parsed, values)?;
        for part in &plan.parts {
            let source = self
                .proxy
                .direct
                .get(&part.source)
                .ok_or_else(|| SqlError::new("08006", "no source is configured"))?;
            if let Some(fault) = source.ask(&part.text).await?.fault {
                let name = self.proxy.catalogue.source(part.source).map(|s| s.name.as_str());
                return Err(translated(fault, self.client, name.unwrap_or_default()));
            }
        }
        Ok(Reply::done(&parsed.schema_tag()))
    }

    async fn explain(&mut self, inner: &Parsed, values: &[Value]) -> Result<Reply, SqlError> {
        let plan = self.planned(inner, values)?;
        let mut lines = plan.explain(&self.proxy.catalogue);
        let mut records: BTreeMap<NodeId, Vec<Key>> = BTreeMap::new();
        for part in &plan.parts {
            if let Some(node) = self.proxy.nodes.get(&part.source) {
                let keys =
                    part.records.iter().map(|r| Key(Bytes::from(format!("{}:{}", r.table, r.key))));
                records.entry(*node).or_default().extend(keys);
            }
        }
        let planned = match self.proxy.engine.xa() {
            Ok(xa) => xa.ask(move |middleware| middleware.plan(&records)).await.unwrap_or_default(),
            Err(_) => Vec::new(),
        };
        for one in planned {
            let rtt = one.rtt.map_or("not measured yet".into(), |rtt| {
                format!("{:.1} ms", rtt.as_secs_f64() * 1e3)
            });
            lines.push(format!(
                "Schedule: {} round trip {rtt}, forecast {:.1} ms, starts after {:.1} ms",
                self.source_name(one.source),
                one.forecast.as_secs_f64() * 1e3,
                one.postponed.as_secs_f64() * 1e3,
            ));
        }
        Ok(Reply::Rows(text_answer("QUERY PLAN", lines), "EXPLAIN"))
    }

    async fn admin(&mut self, words: &[String]) -> Result<Reply, SqlError> {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let proxy = self.proxy.clone();
        let gone = || SqlError::new("57P01", "the proxy is shutting down");
        let answer = match words.as_slice() {
            ["show", "transactions"] => {
                let found = proxy
                    .engine
                    .xa()?
                    .ask(|middleware| middleware.in_doubt())
                    .await
                    .ok_or_else(gone)?;
                let rows = found.into_iter().map(|one| {
                    let sources: Vec<String> =
                        one.sources.iter().map(|node| self.source_name(*node)).collect();
                    vec![
                        one.xid.to_string(),
                        if one.commits { "commits" } else { "rolls back" }.into(),
                        sources.join(", "),
                    ]
                });
                table(&["transaction", "outcome", "waits for"], rows.collect::<Vec<_>>())
            }
            ["show", "hot"] => {
                let found = proxy
                    .engine
                    .xa()?
                    .ask(|middleware| middleware.hottest(20))
                    .await
                    .ok_or_else(gone)?;
                let rows = found.into_iter().map(|((node, key), spot)| {
                    vec![
                        self.source_name(node),
                        String::from_utf8_lossy(&key.0).into_owned(),
                        format!("{spot:?}"),
                    ]
                });
                table(&["source", "record", "footprint"], rows.collect::<Vec<_>>())
            }
            ["show", "pools"] => {
                let rows = proxy.direct.iter().map(|(id, source)| {
                    let (busy, idle) = source.pool();
                    let name =
                        proxy.catalogue.source(*id).map_or_else(String::new, |s| s.name.clone());
                    vec![name, busy.to_string(), idle.to_string()]
                });
                table(&["source", "branches", "idle"], rows.collect::<Vec<_>>())
            }
            ["show", "schedule"] => {
                let records: BTreeMap<NodeId, Vec<Key>> =
                    proxy.nodes.values().map(|node| (*node, Vec::new())).collect();
                let found = proxy
                    .engine
                    .xa()?
                    .ask(move |middleware| middleware.plan(&records))
                    .await
                    .ok_or_else(gone)?;
                let rows = found.into_iter().map(|one| {
                    let ms = |span: std::time::Duration| format!("{:.1}", span.as_secs_f64() * 1e3);
                    vec![
                        self.source_name(one.source),
                        one.rtt.map_or_else(String::new, ms),
                        ms(one.postponed),
                    ]
                });
                table(&["source", "rtt_ms", "starts_after_ms"], rows.collect::<Vec<_>>())
            }
            ["show", "notes"] => {
                let notes = proxy.engine.notes();
                table(
                    &["note", "count"],
                    notes.into_iter().map(|(note, count)| vec![note, count.to_string()]),
                )
            }
            ["alter", "set", name] => {
                let optimizations = optimizations(name).ok_or_else(|| {
                    SqlError::new(
                        "22023",
                        format!("unknown mode `{name}`; use xa, geotp-o1, geotp-o2 or geotp"),
                    )
                })?;
                proxy
                    .engine
                    .xa()?
                    .ask(move |middleware| middleware.optimize(optimizations))
                    .await
                    .ok_or_else(gone)?;
                return Ok(Reply::done("SET"));
            }
            ["resolve", verb @ ("commit" | "rollback"), xid, "at", source] => {
                let xid: Xid =
                    xid.parse().map_err(|error: String| SqlError::new("22023", error))?;
                let id = proxy
                    .catalogue
                    .find_source(source)
                    .and_then(|id| proxy.nodes.get(&id).copied());
                let node =
                    id.ok_or_else(|| SqlError::new("22023", format!("unknown source `{source}`")))?;
                proxy.engine.xa()?.settle(xid, node, *verb == "commit");
                return Ok(Reply::done("RESOLVE"));
            }
            _ => {
                return Err(SqlError::new(
                    "42601",
                    "use SHOW ORTHODROME TRANSACTIONS | HOT | POOLS | SCHEDULE | NOTES, ALTER ORTHODROME SET xa | geotp-o1 | \
                     geotp-o2 | geotp, or RESOLVE ORTHODROME COMMIT | ROLLBACK transaction AT source",
                ));
            }
        };
        Ok(Reply::Rows(answer, "SHOW"))
    }

    /// The columns that a statement will answer with, asked of one of its sources; none if it has no rows.
    pub(super) async fn describe(&mut self, parsed: &Parsed) -> Result<Vec<Column>, SqlError> {
        match &parsed.verb {
            Verb::Data(statement) => {
                let returns = parsed.text.to_lowercase().contains("returning");
                if parsed.word() != "SELECT" && !returns {
                    return Ok(Vec::new());
                }
                let nulls = vec![Value::Null; parsed.parameters];
                // No key is NULL, so any source may be asked, and no row is read.
                let context = Context {
                    client: self.client,
                    isolation: Isolation::ReadCommitted,
                    prefer: self.prefer(),
                    by_key: false,
                };
                let plan = plan(&self.proxy.catalogue, statement, &nulls, &context)?;
                if !plan.has_rows {
                    return Ok(Vec::new());
                }
                self.columns_of(parsed, &plan).await
            }
            Verb::Explain(_) => Ok(text_answer("QUERY PLAN", []).columns),
            Verb::Show(name) => Ok(text_answer(name, []).columns),
            Verb::Other | Verb::Admin(_) => match self.setting(parsed, &[]).await? {
                Reply::Rows(answer, _) => Ok(answer.columns),
                Reply::Done { .. } | Reply::Error(_) => Ok(Vec::new()),
            },
            _ => Ok(Vec::new()),
        }
    }

    async fn columns_of(&mut self, parsed: &Parsed, plan: &Plan) -> Result<Vec<Column>, SqlError> {
        let Some(part) = plan.parts.first() else {
            let nulls = vec![Value::Null; parsed.parameters];
            return Ok(self.elsewhere(parsed, &nulls).await?.columns);
        };
        if plan.is_write && !parsed.text.trim_start().to_lowercase().starts_with("select") {
            // RETURNING: asking would change rows.
            return Err(SqlError::new(
                "0A000",
                "RETURNING cannot be described before execution; use the simple protocol",
            ));
        }
        let source = self
            .proxy
            .direct
            .get(&part.source)
            .ok_or_else(|| SqlError::new("08006", "no source is configured"))?;
        let text = part.text.trim_end_matches(" FOR UPDATE");
        let outcome =
            source.ask(&format!("SELECT * FROM ({text}) AS orthodrome_described LIMIT 0")).await?;
        if let Some(fault) = outcome.fault {
            return Err(fault.into());
        }
        let answer = outcome.done.into_iter().next().map(|(answer, _)| answer).unwrap_or_default();
        let merged = merge(&plan.merge, vec![answer.clone()]).unwrap_or(answer);
        Ok(merged.columns)
    }
}

/// A switch of the optimizations by name.
pub(super) fn optimizations(name: &str) -> Option<Optimizations> {
    let of = |decentralized_prepare, latency_aware, high_contention| {
        Some(Optimizations { decentralized_prepare, latency_aware, high_contention })
    };
    match name {
        "xa" | "xa-local" | "quro" => of(false, false, false),
        "geotp-o1" | "chiller" => of(true, false, false),
        "geotp-o2" => of(true, true, false),
        "geotp" => of(true, true, true),
        _ => None,
    }
}

/// A statement's answer out of its round's.
fn reply(placed: &Placed, answers: &mut BTreeMap<NodeId, Vec<Answer>>) -> Result<Reply, SqlError> {
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
    let count = answer.affected;
    let tag = if placed.verb == "INSERT" {
        format!("INSERT 0 {count}")
    } else {
        format!("{} {count}", placed.verb)
    };
    Ok(Reply::Done { tag, affected: count, last_insert_id: answer.last_insert_id })
}
