//! Generated keys of tables whose rows are at several sources. The sources' own counters would
//! collide, so the proxy generates the values, in blocks that it claims from a row of the table
//! `orthodrome_sequences` at one source. A block is durable before its first value is used, and no
//! two proxies claim the same block. Values that a proxy has claimed and not used when it ends are
//! lost.

use std::sync::Arc;
use std::time::{Duration, Instant};

use orthodrome_core::ordered::OrdMap;

use orthodrome_geotp::sql::ast::Statement;
use orthodrome_geotp::sql::catalog::{Placement, Table};
use orthodrome_geotp::sql::generated::{
    Call, Filled, Filler, calls, fill, put_calls, put_set_calls, return_column, set_calls, target,
};
use orthodrome_geotp::sql::{Dialect, Parsed, SourceId, Value, Verb};
use tokio::sync::Mutex;

use super::driver::Outcome;
use super::session::{Session, SqlError};
use super::words::translated;

/// Number of values in a block; more if the last block was used up quickly.
const BLOCK: i64 = 100;
const BLOCK_MAX: i64 = 10_000;
const SOON: Duration = Duration::from_secs(2);

/// Values that this proxy has claimed and not used.
#[derive(Default)]
pub(crate) struct Blocks(Mutex<OrdMap<String, Arc<Mutex<Block>>>>);

#[derive(Default)]
struct Block {
    next: i64,
    /// The end of the block.
    end: i64,
    size: i64,
    claimed: Option<Instant>,
}

/// The generated keys of an INSERT that is about to run.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Generated {
    pub(crate) table: String,
    /// The name of the sequence in PostgreSQL's form.
    pub(crate) sequence: String,
    /// The first and the last value, if the proxy has generated some.
    pub(crate) given: Option<(i64, i64)>,
    /// True if the source returns the values although the client has not asked for them.
    pub(crate) is_returned: bool,
}

/// The last sequence values of a PostgreSQL client's session.
#[derive(Default)]
pub(crate) struct LastValues {
    by_name: OrdMap<String, i64>,
    last: Option<i64>,
}

impl LastValues {
    pub(crate) fn was_given(&mut self, sequence: &str, value: i64) {
        self.by_name.insert(sequence.to_owned(), value);
        self.last = Some(value);
    }
}

fn sequence_of(table: &str, column: &str) -> String {
    format!("{table}_{column}_seq")
}

fn quoted(text: &str) -> String {
    super::driver::quoted(text)
}

impl Session {
    /// Adds generated keys to an INSERT, and returns them too.
    pub(crate) async fn with_keys(
        &self,
        parsed: &Parsed,
        values: &[Value],
    ) -> Result<Option<(Parsed, Generated)>, SqlError> {
        let Verb::Data(statement) = &parsed.verb else { return Ok(None) };
        let Some(name) = target(statement) else { return Ok(None) };
        let Some(table) = self.with_columns(&name).await? else { return Ok(None) };
        let Some(column) = table.generated.clone() else { return Ok(None) };
        let mut parsed = parsed.clone();
        let Verb::Data(statement) = &mut parsed.verb else { return Ok(None) };
        let mut generated = Generated {
            sequence: sequence_of(&name, &column),
            table: name,
            ..Generated::default()
        };
        if let Placement::Single(at) = table.placement {
            let kind = self.proxy.catalogue.source(at).map(|source| source.kind);
            if kind == Some(Dialect::PostgreSql) {
                if self.client == Dialect::MariaDb {
                    let filler = &mut Filler::Default;
                    fill(statement, &table, &column, self.client, values, filler)?;
                }
                generated.is_returned = return_column(statement, &column, self.client);
            }
            return Ok(Some((parsed, generated)));
        }
        let mut counted = (**statement).clone();
        let Filled { count, largest } = {
            let filler = &mut Filler::Numbers(&mut (1..));
            fill(&mut counted, &table, &column, self.client, values, filler)?
        };
        if let (Some(largest), Dialect::MariaDb) = (largest, self.client) {
            // In MySQL the counter continues after a value that a client has given.
            self.pass(&table, &column, largest).await?;
        }
        if count > 0 {
            let keys = self.keys(&table, &column, count).await?;
            generated.given = keys.first().copied().zip(keys.last().copied());
            let mut keys = keys.into_iter();
            let filler = &mut Filler::Numbers(&mut keys);
            fill(statement, &table, &column, self.client, values, filler)?;
        }
        Ok(Some((parsed, generated)))
    }

    /// The source with the row from which a table's keys are claimed. Source numbers are the same
    /// at every proxy.
    fn counting_source(&self, table: &Table) -> Option<SourceId> {
        table.sources().into_iter().min_by_key(|at| self.proxy.nodes.get(at).copied())
    }

    async fn block(&self, name: &str) -> Arc<Mutex<Block>> {
        self.proxy.blocks.0.lock().await.entry(name.to_owned()).or_default().clone()
    }

    /// Generates new values of a column, one after the other without a gap: MySQL's drivers compute
    /// the keys of several rows from the first.
    async fn keys(&self, table: &Table, column: &str, count: usize) -> Result<Vec<i64>, SqlError> {
        let name = format!("{}.{column}", table.name);
        let block = self.block(&name).await;
        let mut block = block.lock().await;
        let count = count as i64;
        let rest = block.next..block.end;
        if rest.end - rest.start < count {
            self.claim(table, column, &mut block, count, 1).await?;
            if block.next == rest.end && !rest.is_empty() {
                // Nobody else has claimed a block in between.
                block.next = rest.start;
            }
        }
        let first = block.next;
        block.next += count;
        Ok((first..block.next).collect())
    }

    /// Ensures that later values are above this one.
    async fn pass(&self, table: &Table, column: &str, value: i64) -> Result<(), SqlError> {
        let name = format!("{}.{column}", table.name);
        let block = self.block(&name).await;
        let mut block = block.lock().await;
        let Some(above) = value.checked_add(1) else { return Ok(()) };
        if above >= block.end {
            self.claim(table, column, &mut block, 1, above).await
        } else {
            block.next = block.next.max(above);
            Ok(())
        }
    }

    /// Claims the next block, with at least this number of values from `lowest` on.
    async fn claim(
        &self,
        table: &Table,
        column: &str,
        block: &mut Block,
        count: i64,
        lowest: i64,
    ) -> Result<(), SqlError> {
        let is_soon = block.claimed.is_some_and(|claimed| claimed.elapsed() < SOON);
        block.size = if is_soon { (block.size * 2).min(BLOCK_MAX) } else { BLOCK };
        let size = block.size.max(count);
        let home = self.counting_source(table);
        let home = home.ok_or_else(|| SqlError::new("08006", "no source is configured"))?;
        let name = quoted(&format!("{}.{column}", table.name));
        let text = format!(
            "BEGIN; SELECT next_value FROM orthodrome_sequences WHERE name = {name} FOR UPDATE; \
             UPDATE orthodrome_sequences SET next_value = GREATEST(next_value, {lowest}) + {size} WHERE name = {name}; \
             COMMIT"
        );
        for _ in 0..3 {
            let outcome = self.transact(home, &text).await?;
            let is_missing = outcome
                .fault
                .as_ref()
                .is_some_and(|fault| fault.sqlstate == "42P01" || fault.number == 1146);
            if let Some(fault) = outcome.fault.filter(|_| !is_missing) {
                return Err(translated(fault, self.client, &self.name_of(home)));
            }
            let rows = outcome.done.iter().flat_map(|(answer, _)| &answer.rows);
            let cell = rows.flatten().flatten().next();
            let next = cell.and_then(|cell| std::str::from_utf8(cell).ok()?.parse::<i64>().ok());
            if let Some(next) = next.filter(|_| !is_missing) {
                block.next = next.max(lowest);
                block.end = block.next + size;
                block.claimed = Some(Instant::now());
                return Ok(());
            }
            self.begin_counting(home, table, column, is_missing).await?;
        }
        Err(SqlError::new(
            "55000",
            format!(
                "no keys can be claimed for {name}: look at orthodrome_sequences at source {}",
                self.name_of(home)
            ),
        ))
    }

    fn name_of(&self, at: SourceId) -> String {
        self.proxy.catalogue.source(at).map_or_else(|| at.to_string(), |source| source.name.clone())
    }

    async fn transact(&self, at: SourceId, text: &str) -> Result<Outcome, SqlError> {
        let gone = || SqlError::new("08006", "no source is configured");
        Ok(self.proxy.direct.get(&at).ok_or_else(gone)?.transact(text).await?)
    }

    /// Makes the row of a column that has none yet. Its counter begins after the largest value at
    /// any source.
    async fn begin_counting(
        &self,
        home: SourceId,
        table: &Table,
        column: &str,
        is_new: bool,
    ) -> Result<(), SqlError> {
        if is_new {
            let made = "CREATE TABLE IF NOT EXISTS orthodrome_sequences \
                        (name VARCHAR(200) PRIMARY KEY, next_value BIGINT NOT NULL)";
            let outcome = self.transact(home, made).await?;
            // Another proxy may make it at the same moment.
            if let Some(fault) = outcome.fault.filter(|fault| fault.sqlstate != "23505") {
                return Err(SqlError::new(
                    "42501",
                    format!(
                        "source {}: cannot create the table orthodrome_sequences, from which keys are claimed: {}; \
                         create it there as an administrator: {made}",
                        self.name_of(home),
                        fault.message
                    ),
                ));
            }
        }
        let mut next = 1;
        for at in table.sources() {
            let quote = match self.proxy.catalogue.source(at).map(|source| source.kind) {
                Some(Dialect::PostgreSql) => '"',
                Some(Dialect::MariaDb) | None => '`',
            };
            let text =
                format!("SELECT max({quote}{column}{quote}) FROM {quote}{}{quote}", table.name);
            let answer = self.ask(at, &text, false).await?;
            let cell = answer.rows.first().and_then(|row| row.first()?.as_deref());
            let largest = cell.and_then(|cell| std::str::from_utf8(cell).ok()?.parse::<i64>().ok());
            next = next.max(largest.unwrap_or(0).saturating_add(1));
        }
        let name = quoted(&format!("{}.{column}", table.name));
        let kind = self.proxy.catalogue.source(home).map(|source| source.kind);
        let text = match kind {
            Some(Dialect::PostgreSql) => format!(
                "INSERT INTO orthodrome_sequences (name, next_value) VALUES ({name}, {next}) ON CONFLICT DO NOTHING"
            ),
            Some(Dialect::MariaDb) | None => format!(
                "INSERT IGNORE INTO orthodrome_sequences (name, next_value) VALUES ({name}, {next})"
            ),
        };
        let outcome = self.transact(home, &text).await?;
        match outcome.fault {
            Some(fault) => Err(translated(fault, self.client, &self.name_of(home))),
            None => Ok(()),
        }
    }

    /// Replaces sequence functions in a statement of a PostgreSQL client by their values; none if
    /// it uses no sequence of the proxy.
    pub(crate) async fn with_sequences(
        &mut self,
        parsed: &Parsed,
    ) -> Result<Option<Parsed>, SqlError> {
        let Verb::Data(statement) = &parsed.verb else { return Ok(None) };
        if self.client != Dialect::PostgreSql {
            return Ok(None);
        }
        if let Some(parsed) = self.with_set_sequences(parsed).await? {
            return Ok(Some(parsed));
        }
        let Some(calls) = calls(statement) else { return Ok(None) };
        let mut values = Vec::new();
        for call in calls {
            let value = match call {
                Call::Next(sequence) => self.next_value(&sequence).await?,
                Call::Current(sequence) => {
                    let known = self.last_values.by_name.get(&sequence).copied();
                    known.ok_or_else(|| {
                        let why = format!(
                            "currval of sequence \"{sequence}\" is not yet defined in this session"
                        );
                        SqlError::new("55000", why)
                    })?
                }
                Call::Last => self.last_values.last.ok_or_else(|| {
                    SqlError::new("55000", "lastval is not yet defined in this session")
                })?,
            };
            values.push(value);
        }
        let mut parsed = parsed.clone();
        if let Verb::Data(statement) = &mut parsed.verb {
            put_calls(statement, &values);
        }
        Ok(Some(parsed))
    }

    /// The table and the column of a sequence whose values the proxy generates.
    async fn spread_sequence(&self, sequence: &str) -> Result<Option<(Table, String)>, SqlError> {
        let spread = self.proxy.catalogue.tables().find_map(|table| {
            let column =
                sequence.strip_prefix(&table.name)?.strip_prefix('_')?.strip_suffix("_seq")?;
            Some((table.name.clone(), column.to_owned()))
        });
        let Some((name, column)) = spread else { return Ok(None) };
        let table = self.with_columns(&name).await?.filter(|table| {
            table.generated.as_ref() == Some(&column)
                && !matches!(table.placement, Placement::Single(_))
        });
        Ok(table.map(|table| (table, column)))
    }

    /// Sets sequences of the proxy, and replaces the calls by their values; none if the statement
    /// sets no such sequence. The next key is never below one that was given before.
    async fn with_set_sequences(&self, parsed: &Parsed) -> Result<Option<Parsed>, SqlError> {
        let Verb::Data(statement) = &parsed.verb else { return Ok(None) };
        let calls = set_calls(statement);
        let mut found = Vec::new();
        let gives_keys = self
            .proxy
            .catalogue
            .tables()
            .any(|table| !matches!(table.placement, Placement::Single(_)));
        for call in &calls {
            let Some(sequence) = &call.sequence else {
                if gives_keys {
                    return Err(SqlError::new(
                        "0A000",
                        "setval needs the name of the sequence as a constant, because the proxy gives the keys of some \
                         tables itself; write SELECT setval('name', value)",
                    ));
                }
                continue;
            };
            let own = self.spread_sequence(sequence).await?;
            found.extend(own.map(|(table, column)| (table, column, sequence, call.next)));
        }
        if found.is_empty() {
            return Ok(None);
        }
        let Statement::Query(query) = &**statement else { return Ok(None) };
        let is_alone = !query.to_string().to_lowercase().contains(" from ");
        let mut wanted = Vec::new();
        for (table, column, sequence, next) in &found {
            let Some(next) = next.filter(|_| is_alone && found.len() == calls.len()) else {
                return Err(SqlError::new(
                    "0A000",
                    format!(
                        "the proxy gives the keys of sequence \"{sequence}\", and setval needs a constant there; read the \
                         value first, then send SELECT setval('{sequence}', value)"
                    ),
                ));
            };
            wanted.push((table, column, next));
        }
        for (table, column, next) in wanted {
            self.pass(table, column, next.saturating_sub(1)).await?;
        }
        let mut parsed = parsed.clone();
        if let Verb::Data(statement) = &mut parsed.verb {
            put_set_calls(statement);
        }
        Ok(Some(parsed))
    }

    async fn next_value(&mut self, sequence: &str) -> Result<i64, SqlError> {
        if let Some((table, column)) = self.spread_sequence(sequence).await? {
            let keys = self.keys(&table, &column, 1).await?;
            let value = keys.first().copied().unwrap_or_default();
            self.last_values.was_given(sequence, value);
            return Ok(value);
        }
        let name = quoted(&format!("\"{}\"", sequence.replace('"', "\"\"")));
        let mut missing = None;
        let all = self.proxy.catalogue.sources();
        let postgres =
            all.filter(|(_, source)| source.kind == Dialect::PostgreSql).map(|(at, _)| at);
        for at in self.default_source().into_iter().chain(postgres.collect::<Vec<_>>()) {
            if self.proxy.catalogue.source(at).map(|source| source.kind)
                != Some(Dialect::PostgreSql)
            {
                continue;
            }
            match self.ask(at, &format!("SELECT nextval({name})"), true).await {
                Ok(answer) => {
                    let cell = answer.rows.first().and_then(|row| row.first()?.as_deref());
                    let value = cell.and_then(|cell| std::str::from_utf8(cell).ok()?.parse().ok());
                    let value = value.ok_or_else(|| {
                        SqlError::new("XX000", "a source has answered nextval with no number")
                    })?;
                    self.last_values.was_given(sequence, value);
                    return Ok(value);
                }
                Err(error) if error.sqlstate == "42P01" => missing = Some(error),
                Err(error) => return Err(error),
            }
        }
        Err(missing.unwrap_or_else(|| {
            SqlError::new("42P01", format!("relation \"{sequence}\" does not exist"))
        }))
    }
}
