//! The mode `near`: statements of a transaction are answered from copies of the rows, without locks,
//! and remembered. At COMMIT each source executes what is remembered, in one query batch that fails
//! if an answer differs from the one that the client has (docs/adr/0042).
//!
//! A statement whose answer cannot be foreseen sends what is remembered to the sources first. The
//! transaction then continues there with locks, as in the mode `geotp`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use orthodrome_core::NodeId;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::txn::Key;
use orthodrome_geotp::contract::{Last, Part};
use orthodrome_geotp::sql::merge::merge;
use orthodrome_geotp::sql::plan::{
    Does, Foreseeable, Strength, counted, foresee, hashed_cells, locks, overlaid, read_check,
};
use orthodrome_geotp::sql::{
    self, Answer, Context, Dialect, Isolation, Parsed, Plan, Record, SourceId, Value, Verb, plan,
};
use ring::digest;

use super::driver::{Endpoint, Outcome, Session as Line, Setting, Sql, Statement, Trouble};
use super::names;
use super::rounds::{Missed, Round, TRIES};
use super::session::{Reply, Session, SqlError};

/// Maximum number of statements that a transaction remembers, and of the bytes of their texts and
/// answers.
const STEPS_MAX: usize = 256;
const BYTES_MAX: usize = 1 << 20;
/// Maximum number of records of one remembered statement.
const RECORDS_MAX: usize = 64;
/// How long a client's own changes are read at their source. A replica that lags behind by more
/// may show older rows; the transaction that reads them then fails.
const OWN: Duration = Duration::from_secs(5);
/// Maximum number of own changes that are remembered for [`OWN`].
const OWN_MAX: usize = 1_000;
/// How long rows that a transaction has changed itself are read at the source only, after a source
/// has not confirmed an overlaid answer of the table.
const DISTRUST: Duration = Duration::from_secs(60);
/// Number of failures in a row after which a client's next transaction takes locks at the sources as
/// its statements come. It then succeeds however often others change its rows, and even if a copy
/// shows a value differently than the source does.
const UNCONFIRMED_MAX: u32 = 3;
/// Time limit of a read at a copy.
const COPY_ANSWERS: Duration = Duration::from_secs(5);
/// How long a replica that did not answer is left alone.
const SILENT: Duration = Duration::from_secs(5);
/// Maximum number of idle connections to one copy.
const IDLE_MAX: usize = 128;

/// A record: its source, its table, and its key.
type Name = (SourceId, String, String);

fn name_of(source: SourceId, record: &Record) -> Name {
    (source, record.table.clone(), record.key.clone())
}

/// A server with the rows of a source: the source itself, or a replica.
pub(crate) struct Copy {
    endpoint: Endpoint,
    idle: Mutex<Vec<Line>>,
    /// When it last did not answer.
    silent: Mutex<Option<Instant>>,
}

impl Copy {
    pub(crate) fn new(endpoint: Endpoint) -> Self {
        Self { endpoint, idle: Mutex::default(), silent: Mutex::default() }
    }

    fn silent(&self) -> MutexGuard<'_, Option<Instant>> {
        self.silent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn was_silent(&self) {
        *self.silent() = Some(Instant::now());
    }

    fn is_silent(&self) -> bool {
        self.silent().is_some_and(|at| at.elapsed() < SILENT)
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Line>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn connect(&self) -> Result<Line, Trouble> {
        let mut line = Line::connect(&self.endpoint).await?;
        // Neither kind locks anything for such reads, and replicas of PostgreSQL refuse
        // SERIALIZABLE.
        let text = match self.endpoint.kind {
            Dialect::PostgreSql => {
                "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED, READ ONLY"
            }
            Dialect::MariaDb => "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ ONLY",
        };
        line.text(text, Duration::ZERO).await?.ok()?;
        Ok(line)
    }

    /// The answer to one query, with these settings.
    async fn ask(&self, text: &str, settings: &[Setting]) -> Result<Answer, Trouble> {
        let idle = self.idle().pop();
        let asked = match idle {
            Some(line) => self.ask_through(line, text, settings).await,
            None => self.ask_through(self.connect().await?, text, settings).await,
        };
        match asked {
            Err(Trouble::Broken(_)) => {
                // The server may have been restarted since the connection was used.
                self.idle().clear();
                self.ask_through(self.connect().await?, text, settings).await
            }
            other => other,
        }
    }

    async fn ask_through(
        &self,
        mut line: Line,
        text: &str,
        settings: &[Setting],
    ) -> Result<Answer, Trouble> {
        let before = self.endpoint.settle(line.settings(), settings);
        let own = before.len();
        let text = before.into_iter().chain([text.to_owned()]).collect::<Vec<_>>().join(";\n");
        let Outcome { done, fault } = line.text(&text, self.endpoint.one_way).await?;
        if done.len() >= own {
            line.has_settings(settings.to_vec());
            let mut idle = self.idle();
            if idle.len() < IDLE_MAX {
                idle.push(line);
            }
        }
        match fault {
            Some(fault) => Err(Trouble::Fault(fault)),
            None => Ok(done.into_iter().nth(own).map(|(answer, _)| answer).unwrap_or_default()),
        }
    }
}

/// The copies of one source.
pub(crate) struct Copies {
    pub(crate) own: Copy,
    /// The replica that is nearest to this proxy.
    pub(crate) replica: Option<Copy>,
}

impl Copies {
    /// The replica, unless it did not answer a moment ago.
    fn replica(&self) -> Option<&Copy> {
        self.replica.as_ref().filter(|replica| !replica.is_silent())
    }
}

/// Counts of the mode's events.
#[derive(Default)]
pub(crate) struct Counts {
    /// Transactions that were sent to their sources at COMMIT, and committed.
    pub(crate) committed: AtomicU64,
    /// Answers that a source did not confirm.
    pub(crate) differed: AtomicU64,
    /// Transactions that were sent to their sources before COMMIT.
    pub(crate) sent_early: AtomicU64,
    /// Copies that did not answer.
    pub(crate) silent: AtomicU64,
}

/// The mode `near`.
pub(crate) struct Near {
    pub(crate) copies: OrdMap<SourceId, Copies>,
    pub(crate) counts: Counts,
    /// Tables whose overlaid answers a source has not confirmed, and when.
    pub(crate) distrusted: Mutex<OrdMap<String, Instant>>,
}

impl Near {
    fn distrusted(&self) -> MutexGuard<'_, OrdMap<String, Instant>> {
        self.distrusted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A source has not confirmed an answer of this transaction.
    pub(crate) fn differs(&self, deferred: &Deferred) {
        self.counts.differed.fetch_add(1, Ordering::Relaxed);
        let now = Instant::now();
        let tables = deferred.overlaid.iter().map(|table| (table.clone(), now));
        self.distrusted().extend(tables);
    }

    fn trusts(&self, table: &str) -> bool {
        self.distrusted().get(table).is_none_or(|at| at.elapsed() > DISTRUST)
    }

    /// The counts by name, for operators.
    pub(crate) fn notes(&self) -> [(&'static str, u64); 4] {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let Counts { committed, differed, sent_early, silent } = &self.counts;
        [
            ("NearCommitted", count(committed)),
            ("NearDiffered", count(differed)),
            ("NearSentEarly", count(sent_early)),
            ("NearSilent", count(silent)),
        ]
    }
}

/// The answer that a client has to a remembered statement.
#[derive(Clone, Debug)]
enum Expected {
    Rows(Answer),
    Count(u64),
}

/// A remembered statement at one source.
#[derive(Clone, Debug)]
struct Step {
    node: NodeId,
    kind: Dialect,
    does: Does,
    /// The statement for the source, with locks.
    part: sql::Part,
    /// The statement for a copy; empty for changes.
    asked: String,
    expected: Expected,
}

impl Step {
    /// The number of rows that the statement meets.
    fn met(&self) -> u64 {
        match &self.expected {
            Expected::Rows(answer) => answer.rows.len() as u64,
            Expected::Count(count) => *count,
        }
    }
}

/// What an open transaction has been answered from copies.
#[derive(Default)]
pub(crate) struct Deferred {
    steps: Vec<Step>,
    /// Whether records exist, as this transaction sees them.
    known: OrdMap<Name, bool>,
    /// Records that the transaction changes.
    changed: OrdSet<Name>,
    bytes: usize,
    /// Tables with overlaid answers; kept until the transaction has ended.
    overlaid: OrdSet<String>,
}

impl Deferred {
    pub(crate) fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// The sources of the remembered statements.
    pub(crate) fn sources(&self) -> impl Iterator<Item = SourceId> + '_ {
        self.steps.iter().map(|step| step.part.source)
    }

    /// The reads at a source since the transaction's last change there. Earlier ones may be answered
    /// differently now, also if they name other rows: a trigger or a foreign key may have changed those.
    fn reads_since_change(&self, source: SourceId) -> impl Iterator<Item = &Step> {
        let own = self.steps.iter().rev().filter(move |step| step.part.source == source);
        own.take_while(|step| step.does == Does::Read)
    }

    /// Whether every row that PostgreSQL sources insert or do not find has one spelling of its key. Only
    /// then does the name of a missing row keep others from inserting it: `A0` and `a0` may be one key.
    fn names_are_unique(&self) -> bool {
        let is_number = |text: &str| text.parse::<i64>().is_ok_and(|own| own.to_string() == text);
        self.steps.iter().all(|step| {
            let is_found =
                step.does != Does::Insert && step.met() >= step.part.records.len() as u64;
            let mut records = step.part.records.iter();
            step.kind == Dialect::MariaDb
                || is_found
                || records.all(|record| record.key.split(',').all(is_number))
        })
    }

    fn has_changed(&self, part: &sql::Part) -> bool {
        part.records.iter().any(|record| self.changed.contains(&name_of(part.source, record)))
    }

    fn remember(&mut self, step: Step) {
        let answer = match &step.expected {
            Expected::Rows(answer) => answer.rows.iter().flatten().flatten().map(Vec::len).sum(),
            Expected::Count(_) => 0,
        };
        self.bytes += step.part.text.len() + step.asked.len() + answer;
        let (source, records) = (step.part.source, &step.part.records);
        let names = records.iter().map(|record| name_of(source, record));
        match step.does {
            Does::Read => {}
            Does::Update => self.changed.extend(names),
            Does::Insert | Does::Delete => {
                let exists = step.does == Does::Insert;
                for name in names {
                    self.known.insert(name.clone(), exists);
                    self.changed.insert(name);
                }
            }
        }
        self.steps.push(step);
    }
}

/// A client's own recent changes, which replicas may not show yet.
#[derive(Default)]
pub(crate) struct OwnChanges {
    /// Records that the open transaction has changed; an empty name stands for a whole source.
    open: OrdSet<Name>,
    committed: OrdMap<Name, Instant>,
}

impl OwnChanges {
    pub(crate) fn note(&mut self, source: SourceId, records: &[Record]) {
        if records.is_empty() {
            self.open.insert((source, String::new(), String::new()));
        }
        self.open.extend(records.iter().map(|record| name_of(source, record)));
    }

    pub(crate) fn end(&mut self, is_committed: bool) {
        let now = Instant::now();
        let open = std::mem::take(&mut self.open);
        if is_committed {
            self.committed.retain(|_, at| at.elapsed() < OWN);
            for (source, table, key) in open {
                let is_full = self.committed.len() >= OWN_MAX;
                let name = if is_full {
                    (source, String::new(), String::new())
                } else {
                    (source, table, key)
                };
                self.committed.insert(name, now);
            }
        }
    }

    fn has(&self, part: &sql::Part) -> bool {
        let is_recent = |name: &Name| self.committed.get(name).is_some_and(|at| at.elapsed() < OWN);
        is_recent(&(part.source, String::new(), String::new()))
            || part.records.iter().any(|record| is_recent(&name_of(part.source, record)))
    }
}

/// The digest of an answer that [`read_check`] compares.
fn digest_of(kind: Dialect, answer: &Answer) -> String {
    let hash = |bytes: &[u8]| {
        let hash = digest::digest(&digest::SHA256, bytes);
        hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    let row = |row: Vec<Option<Vec<u8>>>| {
        let cells = row.iter().map(|cell| cell.as_deref().map_or_else(|| "~".to_owned(), hash));
        hash(cells.collect::<String>().as_bytes())
    };
    let mut rows: Vec<String> = hashed_cells(kind, answer).into_iter().map(row).collect();
    rows.sort();
    rows.concat()
}

/// The part of a round for one source: the statements of a transaction at it, with checks.
/// `is_keyed`: the branch runs as [`Keyed`](orthodrome_geotp::contract::Isolation::Keyed).
fn part_of(steps: &[&Step], settings: Vec<Setting>, is_keyed: bool) -> Part<Sql> {
    let mut statements: Vec<Statement> = Vec::new();
    let mut part = Part::<Sql> { statements: Vec::new(), records: Vec::new(), writes: false };
    for step in steps {
        part.writes |= step.does != Does::Read;
        let records = &step.part.records;
        part.records.extend(
            records.iter().map(|record| Key::from(format!("{}:{}", record.table, record.key))),
        );
        let mut keys = step.part.keys.clone();
        if is_keyed || step.met() >= records.len() as u64 {
            // The names of missing rows are locked before the first statement, or all rows exist
            // and the statement locks them.
            keys.sought.clear();
        }
        let texts = match &step.expected {
            Expected::Rows(answer) => {
                let digest = digest_of(step.kind, answer);
                vec![read_check(step.kind, &step.part.text, &answer.columns, &digest)]
            }
            Expected::Count(count) => counted(step.kind, &step.part.text, *count),
        };
        let mut prelude = step.part.prelude.clone();
        for text in texts {
            statements.push(Statement {
                prelude: std::mem::take(&mut prelude),
                text,
                keys: std::mem::take(&mut keys),
                settings: Vec::new(),
                may_leave: false,
            });
        }
    }
    if let Some(first) = statements.first_mut() {
        first.settings = settings;
        let own = std::mem::take(&mut first.prelude);
        let names = if is_keyed { names_of(steps) } else { Vec::new() };
        first.prelude = names.into_iter().chain(ordered_locks(steps)).chain(own).collect();
    }
    part.statements = statements;
    part
}

/// At PostgreSQL, queries that lock the names of rows that the statements insert or may not find,
/// in an order that is the same for all transactions.
///
/// At READ COMMITTED each statement sees what was committed when it began. So a name must be locked
/// before the statement that does not find the row: afterwards, another transaction may already have
/// inserted the row and committed.
fn names_of(steps: &[&Step]) -> Vec<String> {
    if steps.first().is_none_or(|step| step.kind != Dialect::PostgreSql) {
        return Vec::new();
    }
    let mut wanted: OrdMap<i64, bool> = OrdMap::new();
    let mut want = |table: &str, key: &str, is_exclusive: bool| {
        *wanted.entry(names::name(table, key)).or_default() |= is_exclusive;
    };
    let is_insert = |step: &&&Step| step.does == Does::Insert;
    let inserted: usize = steps.iter().filter(is_insert).map(|step| step.part.records.len()).sum();
    for step in steps {
        let records = &step.part.records;
        let is_insert = step.does == Does::Insert;
        let is_locked = if is_insert {
            // The statements lock the name of the table then.
            inserted > names::NAMES_MAX
        } else {
            step.met() >= records.len() as u64
        };
        if is_locked {
            continue;
        }
        for Record { table, key, .. } in records {
            want(table, key, is_insert);
            if !is_insert {
                // Who inserts many rows locks the name of their table.
                want(table, "", false);
            }
        }
    }
    names::in_order(&wanted)
}

/// Queries that lock the records of a transaction at one source in the order of their names.
fn ordered_locks(steps: &[&Step]) -> Vec<String> {
    let Some(kind) = steps.first().map(|step| step.kind) else { return Vec::new() };
    let mut wanted: OrdMap<(&str, &str), (&Record, Strength)> = OrdMap::new();
    let (mut count, mut has_unmet) = (0, false);
    for step in steps {
        let strength = match step.does {
            Does::Read => Strength::Share,
            Does::Update => Strength::Update,
            Does::Delete => Strength::Delete,
            // Its own lock is on the name of the row.
            Does::Insert => continue,
        };
        has_unmet |= step.met() < step.part.records.len() as u64;
        for record in &step.part.records {
            count += 1;
            let entry = wanted.entry((&record.table, &record.key)).or_insert((record, strength));
            entry.1 = entry.1.max(strength);
        }
    }
    let wanted: Vec<(&Record, Strength)> = wanted.into_values().collect();
    // A row that exists and does not meet the other conditions of its statement is not locked by
    // the statement itself.
    if count > 1 || has_unmet { locks(kind, &wanted) } else { Vec::new() }
}

impl Session {
    /// Whether the next statement may be answered from a copy.
    pub(crate) fn may_defer(&self) -> bool {
        let is_block = self.in_block || !self.is_autocommit();
        self.proxy.near.is_some()
            && is_block
            && self.open.is_none()
            && self.savepoints.is_empty()
            && self.isolation() == Isolation::Serializable
            && !self.has_schema
            && self.unconfirmed < UNCONFIRMED_MAX
            && self.deferred.steps.len() < STEPS_MAX
            && self.deferred.bytes < BYTES_MAX
    }

    /// The answer to a statement, from copies, if it can be foreseen. Then the statement is
    /// remembered.
    pub(crate) async fn defer(
        &mut self,
        parsed: &Parsed,
        values: &[Value],
        plan: &Plan,
    ) -> Result<Option<Reply>, SqlError> {
        let Verb::Data(statement) = &parsed.verb else { return Ok(None) };
        let is_small = |part: &sql::Part| {
            !part.records.is_empty()
                && part.records.len() <= RECORDS_MAX
                && part.keys.filled.is_empty()
        };
        if !self.may_defer() || plan.parts.is_empty() || !plan.parts.iter().all(is_small) {
            return Ok(None);
        }
        let Some(foreseen) = foresee(&self.catalogue(), statement, values, self.client) else {
            return Ok(None);
        };
        let records: usize = plan.parts.iter().map(|part| part.records.len()).sum();
        if foreseen.is_ordered && records > 1 {
            // Only the rows are compared, not their order.
            return Ok(None);
        }
        if !self.gives_no_key(&foreseen, plan).await? {
            return Ok(None);
        }
        if foreseen.does == Does::Read {
            return self.defer_read(parsed, values, plan, foreseen.is_exact).await;
        }
        let [part] = plan.parts.as_slice() else { return Ok(None) };
        let Some(count) = self.foreseen_count(parsed, values, part, &foreseen).await? else {
            return Ok(None);
        };
        let Some(step) = self.step(part, foreseen.does, String::new(), Expected::Count(count))
        else {
            return Ok(None);
        };
        self.deferred.remember(step);
        let word = parsed.word();
        let tag =
            if word == "INSERT" { format!("INSERT 0 {count}") } else { format!("{word} {count}") };
        Ok(Some(Reply::Done { tag, affected: count, last_insert_id: 0 }))
    }

    /// False if the source may generate a key that a MySQL client is told.
    async fn gives_no_key(&self, foreseen: &Foreseeable, plan: &Plan) -> Result<bool, SqlError> {
        let (Some(listed), Dialect::MariaDb) = (foreseen.listed, self.client) else {
            return Ok(true);
        };
        let record = plan.parts.first().and_then(|part| part.records.first());
        let Some(record) = record else { return Ok(false) };
        let table = self.with_columns(&record.table).await?;
        Ok(table.is_some_and(|table| (1..=listed).contains(&table.columns.len())))
    }

    fn step(
        &self,
        part: &sql::Part,
        does: Does,
        asked: String,
        expected: Expected,
    ) -> Option<Step> {
        let node = *self.proxy.nodes.get(&part.source)?;
        let kind = self.proxy.catalogue.source(part.source)?.kind;
        Some(Step { node, kind, does, part: part.clone(), asked, expected })
    }

    /// The plan of a query for copies: without locks.
    async fn unlocked(&self, parsed: &Parsed, values: &[Value]) -> Result<Plan, SqlError> {
        let Verb::Data(statement) = &parsed.verb else {
            return Err(SqlError::new("XX000", "internal error: the statement has no plan"));
        };
        let context = self.copy_context(parsed, values).await;
        Ok(plan(&self.catalogue(), statement, values, &context)?)
    }

    async fn copy_context(&self, parsed: &Parsed, values: &[Value]) -> Context {
        Context {
            client: self.client,
            isolation: Isolation::ReadCommitted,
            prefer: self.prefer(),
            kinds: self.kinds_for(parsed, values).await,
            collations: OrdMap::new(),
            by_key: false,
            default_source: self.default_source(),
        }
    }

    async fn defer_read(
        &mut self,
        parsed: &Parsed,
        values: &[Value],
        locked: &Plan,
        is_exact: bool,
    ) -> Result<Option<Reply>, SqlError> {
        let unlocked = self.unlocked(parsed, values).await?;
        if unlocked.parts.len() != locked.parts.len() {
            return Ok(None);
        }
        let mut steps = Vec::new();
        for (locked, unlocked) in locked.parts.iter().zip(&unlocked.parts) {
            let Some(text) = self.overlaid(locked, &unlocked.text).await? else { return Ok(None) };
            let before =
                self.deferred.reads_since_change(unlocked.source).find(|step| step.asked == text);
            let answer = match before.map(|step| &step.expected) {
                Some(Expected::Rows(answer)) => answer.clone(),
                Some(Expected::Count(_)) | None => {
                    let Some(answer) = self.ask_copy(locked, &text).await? else {
                        return Ok(None);
                    };
                    answer
                }
            };
            let expected = Expected::Rows(answer);
            let Some(step) = self.step(locked, Does::Read, text, expected) else {
                return Ok(None);
            };
            steps.push(step);
        }
        let answers: Vec<Answer> = steps
            .iter()
            .filter_map(|step| match &step.expected {
                Expected::Rows(answer) => Some(answer.clone()),
                Expected::Count(_) => None,
            })
            .collect();
        if let ([part], [answer], true) = (locked.parts.as_slice(), answers.as_slice(), is_exact)
            && let [record] = part.records.as_slice()
        {
            self.deferred.known.insert(name_of(part.source, record), !answer.rows.is_empty());
        }
        let is_seen = |step: &Step| {
            let mut reads = self.deferred.reads_since_change(step.part.source);
            reads.any(|other| other.asked == step.asked)
        };
        let new: Vec<Step> = steps.into_iter().filter(|step| !is_seen(step)).collect();
        for step in new {
            self.deferred.remember(step);
        }
        Ok(Some(Reply::Rows(merge(&unlocked.merge, answers)?, "SELECT")))
    }

    /// The number of rows that a change will meet; none if it cannot be foreseen.
    async fn foreseen_count(
        &mut self,
        parsed: &Parsed,
        values: &[Value],
        part: &sql::Part,
        foreseen: &Foreseeable,
    ) -> Result<Option<u64>, SqlError> {
        let names: Vec<Name> =
            part.records.iter().map(|record| name_of(part.source, record)).collect();
        let known: Vec<bool> =
            names.iter().filter_map(|name| self.deferred.known.get(name).copied()).collect();
        let rows = names.len() as u64;
        if foreseen.does == Does::Insert {
            let distinct: OrdSet<&Name> = names.iter().collect();
            if distinct.len() < names.len() || known.contains(&true) {
                return Ok(None);
            }
            if known.len() == names.len() {
                return Ok(Some(rows));
            }
        } else if let (true, [exists]) = (foreseen.is_exact && names.len() == 1, known.as_slice()) {
            return Ok(Some(u64::from(*exists)));
        }
        let Some(question) = &foreseen.question else { return Ok(None) };
        let context = self.copy_context(parsed, values).await;
        let Ok(asked) = plan(&self.catalogue(), question, &[], &context) else { return Ok(None) };
        let [question] = asked.parts.as_slice() else { return Ok(None) };
        if question.source != part.source {
            return Ok(None);
        }
        let Some(text) = self.overlaid(part, &question.text).await? else { return Ok(None) };
        let Some(answer) = self.ask_copy(part, &text).await? else { return Ok(None) };
        let cell = answer.rows.first().and_then(|row| row.first()).cloned().flatten();
        let count = cell.and_then(|cell| String::from_utf8(cell).ok()?.parse::<u64>().ok());
        let Some(count) = count else { return Ok(None) };
        if foreseen.does == Does::Insert {
            // If a row exists, the source reports it in its own words.
            return Ok((count == 0).then_some(rows));
        }
        if let (true, [name]) = (foreseen.is_exact, names.as_slice()) {
            self.deferred.known.insert(name.clone(), count > 0);
        }
        Ok(Some(count))
    }

    /// A query for these records with the transaction's own changes, which no copy has. None if it
    /// cannot be expressed.
    async fn overlaid(&mut self, part: &sql::Part, text: &str) -> Result<Option<String>, SqlError> {
        if !self.deferred.has_changed(part) {
            return Ok(Some(text.to_owned()));
        }
        let Some(table) = part.records.first().map(|record| record.table.clone()) else {
            return Ok(None);
        };
        let is_trusted = self.proxy.near.as_ref().is_some_and(|near| near.trusts(&table));
        let (true, Some(known)) = (is_trusted, self.with_columns(&table).await?) else {
            return Ok(None);
        };
        let Some(kind) = self.proxy.catalogue.source(part.source).map(|source| source.kind) else {
            return Ok(None);
        };
        let is_met = |step: &&Step| {
            step.does != Does::Read
                && step.part.source == part.source
                && step.part.records.iter().any(|record| part.records.contains(record))
        };
        let changes: Vec<&str> =
            self.deferred.steps.iter().filter(is_met).map(|step| &*step.part.text).collect();
        let records: Vec<&Record> = part.records.iter().collect();
        let query = overlaid(kind, text, &records, &changes, &known.columns);
        if query.is_some() {
            self.deferred.overlaid.insert(table);
        }
        Ok(query)
    }

    /// The answer of the nearest copy to a query for these records. None if it must come from the
    /// source: a copy does not answer, or refuses the query, or may not have the client's own
    /// changes.
    async fn ask_copy(&self, part: &sql::Part, text: &str) -> Result<Option<Answer>, SqlError> {
        let Some(near) = &self.proxy.near else { return Ok(None) };
        let Some(copies) = near.copies.get(&part.source) else { return Ok(None) };
        let kind = self.proxy.catalogue.source(part.source).map(|source| source.kind);
        let settings = kind.map_or_else(Vec::new, |kind| self.settings.at(kind));
        let mut replica = copies.replica();
        if self.own_changes.has(part) {
            let (Ok(xa), Some(&node)) =
                (self.proxy.engine.xa(), self.proxy.nodes.get(&part.source))
            else {
                return Ok(None);
            };
            let session = self.id();
            let awaits = xa.ask(move |middleware| middleware.awaits_own(session, node)).await;
            if awaits != Some(false) {
                return Ok(None);
            }
            replica = None;
        }
        for copy in replica.into_iter().chain([&copies.own]) {
            match tokio::time::timeout(COPY_ANSWERS, copy.ask(text, &settings)).await {
                Ok(Ok(answer)) => return Ok(Some(answer)),
                Ok(Err(Trouble::Fault(_))) => return Ok(None),
                Ok(Err(Trouble::Broken(_))) | Err(_) => {
                    near.counts.silent.fetch_add(1, Ordering::Relaxed);
                    copy.was_silent();
                }
            }
        }
        Ok(None)
    }

    /// The round that executes what is remembered, with checks.
    /// `is_keyed`: it begins a branch of [`Keyed`](orthodrome_geotp::contract::Isolation::Keyed).
    pub(crate) fn remembered(&mut self, is_keyed: bool) -> Round {
        self.unconfirmed += 1;
        // The names of overlaid tables remain until the transaction has ended.
        let overlaid = std::mem::take(&mut self.deferred.overlaid);
        let steps = std::mem::take(&mut self.deferred).steps;
        self.deferred.overlaid = overlaid;
        let mut by_node: OrdMap<NodeId, Vec<&Step>> = OrdMap::new();
        for step in &steps {
            by_node.entry(step.node).or_default().push(step);
            if step.does != Does::Read {
                self.own_changes.note(step.part.source, &step.part.records);
            }
        }
        let mut round = Round::default();
        for (node, steps) in by_node {
            let settings = steps.first().map_or_else(Vec::new, |step| self.settings.at(step.kind));
            round.parts.insert(node, part_of(&steps, settings, is_keyed));
        }
        round
    }

    /// Sends what is remembered to the sources, where the transaction continues.
    pub(crate) async fn send_remembered(&mut self) -> Result<(), SqlError> {
        if self.deferred.is_empty() {
            return Ok(());
        }
        self.note_sent_early();
        let round = self.remembered(false);
        self.round(round, &[], Last::No, false).await.map(drop)
    }

    pub(crate) fn note_sent_early(&self) {
        if let Some(near) = &self.proxy.near {
            near.counts.sent_early.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Commits a transaction of which no source knows yet.
    pub(crate) async fn commit_remembered(&mut self) -> Result<Reply, SqlError> {
        // Without unique names only SERIALIZABLE keeps rows from appearing.
        let is_keyed = self.deferred.names_are_unique();
        let round = self.remembered(is_keyed);
        let mut tries = TRIES;
        loop {
            tries -= 1;
            match self.attempt(round.clone(), &[], Last::Commit, true, is_keyed).await {
                Ok(_) => {
                    self.over(true);
                    if let Some(near) = &self.proxy.near {
                        near.counts.committed.fetch_add(1, Ordering::Relaxed);
                    }
                    return Ok(Reply::done("COMMIT"));
                }
                Err(Missed { lost: true, .. }) if tries > 0 => {}
                Err(missed) => {
                    self.over(false);
                    return Err(missed.error);
                }
            }
        }
    }
}
