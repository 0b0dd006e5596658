//! Commands that list keys: `SCAN`, `KEYS`, `DBSIZE`, `RANDOMKEY`, `FLUSHDB` and `FLUSHALL`, which
//! scan the range of a database's keys; `HSCAN`, `SSCAN` and `ZSCAN`, which read one key.
//!
//! Each page of a scan is one snapshot. A key exists for these commands if it exists for `TYPE` at the
//! time of this node. They do not remove keys that have expired.
//!
//! The node keeps what is left to scan for each cursor that it has given, up to a bound. A client may
//! send a cursor on another connection, and again if an answer was lost. So a cursor is kept when it
//! has been used; the one before it in the same iteration is dropped then.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher as _, Hasher as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use orthodrome_core::Key;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::procedure::redis::keys::Keys;
use orthodrome_core::procedure::redis::reply::{Answer, Failure, NOT_INTEGER, Reply, SYNTAX};
use orthodrome_core::procedure::redis::{Batch, Command, KeyName, number};
use orthodrome_core::scan::{KeyRange, NAMES_MAX, Page, Scan, ScanError};
use orthodrome_core::txn::{AbortReason, Read, Value};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::connection::{Connection, DATABASES};
use super::glob::Pattern;
use super::run::{Trouble, Work, now_ms, prefix};
use crate::gateway::GatewayError;
use crate::scan::ScanFailed;
use crate::service::Refusal;

/// The keys that one `SCAN` looks at if it does not say how many.
const COUNT: usize = 10;
/// The most keys that one `KEYS` or `DBSIZE` looks at.
const LISTED_MAX: usize = 1_000_000;
/// The most bytes of the answer to one `KEYS`, as [`Reply::bytes`] counts them.
const LISTED_BYTES_MAX: usize = 64 << 20;
/// The answers of `KEYS` that a node keeps at the same time.
const LISTS_MAX: usize = 4;
/// The keys from which `RANDOMKEY` chooses.
const CHOICE: usize = 100;

/// The most cursors that a node keeps.
const CURSORS_MAX: usize = 4_096;
/// The most bytes of all cursors.
const CURSORS_BYTES_MAX: usize = 1 << 20;
/// What a cursor counts besides the ends of its range.
const CURSOR_BYTES: usize = 128;
/// Numbers of cursors have 53 bits, because some clients keep them as floating-point numbers.
const NUMBERS: u64 = (1 << 53) - 1;

/// How long a scan waits before it is repeated, at first.
const PAUSE: Duration = Duration::from_millis(5);
/// The longest such pause.
const PAUSE_MAX: Duration = Duration::from_millis(500);

const INVALID_CURSOR: Failure = Failure::new("ERR invalid cursor");
const UNKNOWN_CURSOR: Failure = Failure::new(
    "ERR this node does not know the cursor in this database: another node gave it, the node \
     restarted, or newer cursors took its place; begin again with cursor 0",
);
const TOO_MANY: Failure = Failure::new(
    "ERR the database has more than 1000000 keys, or the answer more than 67108864 bytes; use SCAN",
);
const STOPPING: Failure = Failure::new("ERR this node is shutting down; use another one");
const LATE: Failure =
    Failure::new("ERR the scan did not end within limits.request_timeout_ms; it had no effect");

/// A command that lists keys, or the elements of a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Listing {
    DbSize,
    FlushAll,
    FlushDb,
    HScan,
    Keys,
    RandomKey,
    Scan,
    SScan,
    ZScan,
}

impl Listing {
    /// True if it removes keys.
    pub(super) fn is_write(self) -> bool {
        matches!(self, Self::FlushAll | Self::FlushDb)
    }

    /// True if it reads one key, which its first argument names.
    pub(super) fn has_key(self) -> bool {
        matches!(self, Self::HScan | Self::SScan | Self::ZScan)
    }
}

/// What a node keeps for these commands.
#[derive(Debug)]
pub(super) struct Listings {
    cursors: Mutex<Cursors>,
    /// Places for answers of `KEYS`.
    lists: Arc<Semaphore>,
    /// The node ends.
    ending: CancellationToken,
}

impl Listings {
    pub(super) fn new(ending: CancellationToken) -> Self {
        let cursors = Mutex::new(Cursors::new(random()));
        Self { cursors, lists: Arc::new(Semaphore::new(LISTS_MAX)), ending }
    }

    fn cursors(&self) -> MutexGuard<'_, Cursors> {
        // No code that holds the lock can leave the state half changed.
        self.cursors.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A random number. The standard library seeds each hasher at random.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// What is left of an iteration.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Cursor {
    database: u8,
    rest: KeyRange,
    /// The place of the cursor before it in the same iteration.
    before: Option<u64>,
}

impl Cursor {
    fn bytes(&self) -> usize {
        let KeyRange { from, until } = &self.rest;
        from.len() + until.as_ref().map_or(0, Key::len) + CURSOR_BYTES
    }
}

/// The cursors that a node has given.
#[derive(Debug)]
struct Cursors {
    /// By their places, the order in which they were given.
    open: OrdMap<u64, Cursor>,
    bytes: usize,
    /// The place of the last one.
    last: u64,
    /// The number of the cursor at place 0. It is random, so that numbers that another node has
    /// given, or this node before it restarted, are not among those of this node.
    base: u64,
}

impl Cursors {
    fn new(base: u64) -> Self {
        Self { open: OrdMap::new(), bytes: 0, last: 0, base: base & NUMBERS }
    }

    /// The cursor with this number, and its place. It is used now, so that its client knows it: the
    /// one before it is dropped.
    fn get(&mut self, number: u64, database: u8) -> Option<(u64, KeyRange)> {
        let place = number.wrapping_sub(self.base) & NUMBERS;
        let cursor = self.open.get_mut(&place);
        let cursor = cursor.filter(|cursor| number <= NUMBERS && cursor.database == database)?;
        let (rest, before) = (cursor.rest.clone(), cursor.before.take());
        if let Some(before) = before {
            self.remove(before);
        }
        Some((place, rest))
    }

    fn remove(&mut self, place: u64) {
        if let Some(cursor) = self.open.remove(&place) {
            self.bytes = self.bytes.saturating_sub(cursor.bytes());
        }
    }

    /// Adds a cursor; its number, which is not 0.
    fn add(&mut self, cursor: Cursor) -> u64 {
        let number = loop {
            self.last = (self.last + 1) & NUMBERS;
            let number = self.base.wrapping_add(self.last) & NUMBERS;
            if number != 0 {
                break number;
            }
        };
        self.bytes += cursor.bytes();
        self.open.insert(self.last, cursor);
        while self.open.len() > CURSORS_MAX || self.bytes > CURSORS_BYTES_MAX {
            let Some((_, oldest)) = self.open.pop_first() else { break };
            self.bytes = self.bytes.saturating_sub(oldest.bytes());
        }
        number
    }
}

/// What follows the cursor of a command.
#[derive(Debug)]
struct Options {
    pattern: Option<Pattern>,
    count: usize,
    /// The type of the keys.
    kind: Option<Bytes>,
    /// `NOVALUES`
    only_names: bool,
}

impl Options {
    fn parse(listing: Listing, words: &[Bytes]) -> Result<Self, Failure> {
        let mut options = Self { pattern: None, count: COUNT, kind: None, only_names: false };
        let is = |word: &Bytes, name: &str| word.eq_ignore_ascii_case(name.as_bytes());
        let mut rest = words;
        loop {
            rest = match rest {
                [] => return Ok(options),
                [word, given, others @ ..] if is(word, "match") => {
                    options.pattern = pattern(given)?;
                    others
                }
                [word, given, others @ ..] if is(word, "count") => {
                    let count = number::integer(given).ok_or(NOT_INTEGER)?;
                    let count = usize::try_from(count).ok().filter(|count| *count > 0);
                    options.count = count.ok_or(SYNTAX)?;
                    others
                }
                [word, given, others @ ..] if is(word, "type") && listing == Listing::Scan => {
                    options.kind = Some(given.clone());
                    others
                }
                [word, others @ ..] if is(word, "novalues") && listing == Listing::HScan => {
                    options.only_names = true;
                    others
                }
                [word, ..] if is(word, "novalues") && listing.has_key() => {
                    return Err(Failure::new("ERR NOVALUES option can only be used in HSCAN"));
                }
                _ => return Err(SYNTAX),
            };
        }
    }
}

/// A pattern; none if every name matches it.
fn pattern(text: &Bytes) -> Result<Option<Pattern>, Failure> {
    if text.as_ref() == b"*" { Ok(None) } else { Pattern::parse(text).map(Some) }
}

fn is_match(pattern: Option<&Pattern>, name: &[u8]) -> bool {
    pattern.is_none_or(|pattern| pattern.matches(name))
}

/// The number of a cursor.
fn cursor(word: &Bytes) -> Result<u64, Failure> {
    let is_number = word.iter().all(u8::is_ascii_digit);
    let text = std::str::from_utf8(word).ok().filter(|_| is_number);
    text.and_then(|text| text.parse().ok()).ok_or(INVALID_CURSOR)
}

/// The keys of a database whose names may match.
fn range(database: u8, pattern: Option<&Pattern>) -> KeyRange {
    let prefix = prefix(database);
    pattern.map_or_else(|| KeyRange::prefix(prefix.as_bytes()), |pattern| pattern.range(&prefix))
}

/// The keys of all databases. Keys of channels are not among them.
fn all_databases() -> KeyRange {
    // After the prefix, a database has its number.
    KeyRange { from: Key::from("redis/0"), until: Some(Key::from("redis/:")) }
}

/// The keys that are in both ranges.
fn common(one: KeyRange, other: KeyRange) -> KeyRange {
    let until = match (one.until, other.until) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    };
    KeyRange { from: one.from.max(other.from), until }
}

/// The Redis key that this key of the database stores.
fn key_name(key: &Key) -> Option<KeyName> {
    (0..DATABASES).find_map(|database| {
        let prefix = prefix(database);
        let is_in = key.bytes().starts_with(prefix.as_bytes());
        is_in.then(|| (database, key.to_bytes().slice(prefix.len()..)))
    })
}

/// Tells which keys exist now, and their types, as `TYPE` does.
struct Kinds(Batch);

impl Kinds {
    fn now() -> Self {
        let mut batch = Batch::new(1, vec![Command::Keys(0, Keys::Type)], Vec::new(), false);
        batch.now_ms = now_ms();
        Self(batch)
    }

    /// The type of a key with this value; none if the key does not exist.
    fn of(&self, value: &Value) -> Option<&'static str> {
        let replies = self.0.evaluate(|_| Some(value.clone()), usize::MAX).replies;
        let Some(Reply::Status(kind)) = replies.first() else { return None };
        Some(*kind).filter(|kind| *kind != "none")
    }
}

/// The names and types of those keys of a page that exist now.
fn existing(page: &Page, database: u8) -> impl Iterator<Item = (Bytes, &'static str)> {
    let (kinds, start) = (Kinds::now(), prefix(database).len());
    page.rows.iter().filter_map(move |(key, read): &(Key, Read)| {
        let kind = kinds.of(read.value.as_ref()?)?;
        let name = key.to_bytes();
        Some((name.slice(start.min(name.len())..), kind))
    })
}

/// A random place between two keys.
fn between(low: &Key, high: &Key) -> Key {
    let (low, high) = (low.bytes(), high.bytes());
    let same = low.iter().zip(high).take_while(|(one, other)| one == other).count();
    let number = |key: &[u8]| {
        let bytes = key.iter().skip(same).chain([&0; 8]).take(8);
        bytes.fold(0_u64, |number, byte| number << 8 | u64::from(*byte))
    };
    let (least, most) = (number(low), number(high));
    let width = most.saturating_sub(least).saturating_add(1);
    let place = least.saturating_add(random() % width);
    let begin = low.get(..same).unwrap_or_default();
    Key::from([begin, &place.to_be_bytes()].concat())
}

/// True if the same scan may succeed after a pause.
fn is_busy(failed: &ScanFailed) -> bool {
    match failed {
        ScanFailed::Scan(ScanError::Busy | ScanError::Refused(AbortReason::Overload))
        | ScanFailed::Overloaded
        | ScanFailed::TooManyWatches
        | ScanFailed::Gateway(
            GatewayError::Overloaded { .. } | GatewayError::OverloadedBytes { .. },
        ) => true,
        ScanFailed::Scan(ScanError::Refused(_) | ScanError::NoFence)
        | ScanFailed::Watch(_)
        | ScanFailed::Unsupported
        | ScanFailed::Late
        | ScanFailed::Older(_)
        | ScanFailed::Gateway(
            GatewayError::Stopping
            | GatewayError::Failed(_)
            | GatewayError::UnknownTransaction(_)
            | GatewayError::AlreadyBegun(_)
            | GatewayError::Used(_)
            | GatewayError::Unregistered(_)
            | GatewayError::NotUndecided(..)
            | GatewayError::Lost(_),
        ) => false,
    }
}

/// A command that passes over a range, page by page.
struct Walk {
    name: &'static str,
    rest: Option<KeyRange>,
}

impl Connection {
    /// Answers a command that lists keys.
    pub(super) async fn listing(
        &mut self,
        listing: Listing,
        name: &'static str,
        arguments: &[Bytes],
    ) -> Reply {
        let answer = match self.permit(name, listing.is_write()) {
            Ok(()) => self.list(listing, name, arguments).await,
            Err(failure) => Err(failure),
        };
        let reply = answer.unwrap_or_else(Reply::Error);
        self.runner.front().count_redis(name, matches!(reply, Reply::Error(_)));
        reply
    }

    async fn list(&mut self, listing: Listing, name: &'static str, arguments: &[Bytes]) -> Answer {
        let walk = |range| Walk { name, rest: Some(range) };
        let database = self.database;
        match listing {
            Listing::Scan => self.scan(name, arguments).await,
            Listing::Keys => {
                let given = arguments.first().ok_or(SYNTAX)?;
                let pattern = pattern(given)?;
                self.keys(walk(range(database, pattern.as_ref())), pattern.as_ref()).await
            }
            Listing::DbSize => self.count(walk(range(database, None))).await,
            Listing::RandomKey => self.random_key(walk(range(database, None))).await,
            Listing::FlushDb | Listing::FlushAll => {
                let is_mode = |word: &Bytes| {
                    word.eq_ignore_ascii_case(b"sync") || word.eq_ignore_ascii_case(b"async")
                };
                if arguments.len() > 1 || !arguments.iter().all(is_mode) {
                    return Err(SYNTAX);
                }
                let is_all = listing == Listing::FlushAll;
                let range = if is_all { all_databases() } else { range(database, None) };
                self.flush_keys(walk(range)).await
            }
            Listing::HScan | Listing::SScan | Listing::ZScan => {
                self.elements(listing, arguments).await
            }
        }
    }

    /// The most keys of a page: one transaction reads them.
    fn page_max(&self) -> usize {
        (self.runner.front().limits().keys_max as usize).clamp(1, NAMES_MAX)
    }

    /// Scans one page, again while the node is busy.
    async fn page(&self, name: &str, mut scan: Scan) -> Result<Page, Failure> {
        let front = self.runner.front();
        let Some(caller) = &self.caller else { return Ok(Page::default()) };
        let deadline = Instant::now() + front.limits().request_timeout;
        let mut pause = PAUSE;
        scan.limit = scan.limit.min(self.page_max());
        loop {
            let scanned = front.scan(caller, scan.clone());
            let why = match tokio::time::timeout_at(deadline, scanned).await {
                Err(_) => return Err(LATE),
                Ok(Ok(Ok(page))) => return Ok(page),
                Ok(Ok(Err(ScanFailed::Unsupported))) => {
                    return Err(Failure::of(format!(
                        "ERR command '{name}' is not available with this cluster's protocol"
                    )));
                }
                Ok(Ok(Err(failed))) if is_busy(&failed) => {
                    if failed == ScanFailed::Scan(ScanError::Busy) {
                        // Fewer keys are created in a shorter range.
                        scan.limit = (scan.limit / 2).max(1);
                    }
                    failed.to_string()
                }
                Ok(Ok(Err(failed))) => return Err(Failure::of(format!("ERR {failed}"))),
                Ok(Err(Refusal::Busy(why))) => why,
                Ok(Err(Refusal::Denied(why))) => {
                    return Err(Failure::of(format!("NOPERM {why}")));
                }
                Ok(Err(Refusal::Never(why))) => return Err(Failure::of(format!("ERR {why}"))),
            };
            let until = Instant::now() + pause;
            if until >= deadline {
                return Err(Failure::of(format!("ERR {why}")));
            }
            tokio::time::sleep_until(until).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// The next page; none if nothing is left.
    async fn next_page(&self, walk: &mut Walk, limit: usize) -> Result<Option<Page>, Failure> {
        let Some(range) = walk.rest.take() else { return Ok(None) };
        if self.runner.listings().ending.is_cancelled() {
            return Err(STOPPING);
        }
        let mut page = self.page(walk.name, Scan { range, backwards: false, limit }).await?;
        walk.rest = page.rest.take();
        Ok(Some(page))
    }

    /// `SCAN cursor [MATCH pattern] [COUNT n] [TYPE type]`
    async fn scan(&self, name: &str, arguments: &[Bytes]) -> Answer {
        let (first, rest) = arguments.split_first().ok_or(SYNTAX)?;
        let number = cursor(first)?;
        let options = Options::parse(Listing::Scan, rest)?;
        let (database, pattern) = (self.database, options.pattern.as_ref());
        let mut left = range(database, pattern);
        let mut before = None;
        if number != 0 {
            let known = self.runner.listings().cursors().get(number, database);
            let (place, rest) = known.ok_or(UNKNOWN_CURSOR)?;
            // The pattern may be another one than before.
            left = common(rest, left);
            before = Some(place);
        }
        let mut page = Page::default();
        if !left.is_empty() {
            let scan = Scan { range: left, backwards: false, limit: options.count };
            page = self.page(name, scan).await?;
        }
        let next = page.rest.take().map_or(0, |rest| {
            self.runner.listings().cursors().add(Cursor { database, rest, before })
        });
        let is_wanted = |(name, kind): &(Bytes, &str)| {
            options.kind.as_ref().is_none_or(|own| own.eq_ignore_ascii_case(kind.as_bytes()))
                && is_match(pattern, name)
        };
        let found = existing(&page, database).filter(is_wanted);
        let found = found.map(|(name, _)| Reply::Bulk(name)).collect();
        Ok(Reply::Array(vec![Reply::Bulk(next.to_string().into()), Reply::Array(found)]))
    }

    /// `KEYS pattern`
    async fn keys(&mut self, mut walk: Walk, pattern: Option<&Pattern>) -> Answer {
        if self.listed.is_none() {
            let lists = Arc::clone(&self.runner.listings().lists);
            let time = self.runner.front().limits().request_timeout;
            let place = tokio::time::timeout(time, lists.acquire_owned()).await;
            self.listed = place.ok().and_then(Result::ok);
            if self.listed.is_none() {
                return Err(Failure::of(format!(
                    "ERR busy: {LISTS_MAX} KEYS commands run at this node; use SCAN"
                )));
            }
        }
        let (mut looked, mut bytes, mut found) = (0, 0, Vec::new());
        while let Some(page) = self.next_page(&mut walk, NAMES_MAX).await? {
            looked += page.rows.len();
            for (name, _) in existing(&page, self.database) {
                if is_match(pattern, &name) {
                    let reply = Reply::Bulk(name);
                    bytes += reply.bytes();
                    found.push(reply);
                }
            }
            if looked > LISTED_MAX || bytes > LISTED_BYTES_MAX {
                return Err(TOO_MANY);
            }
        }
        Ok(Reply::Array(found))
    }

    /// `DBSIZE`
    async fn count(&self, mut walk: Walk) -> Answer {
        let (mut looked, mut found) = (0, 0);
        while let Some(page) = self.next_page(&mut walk, NAMES_MAX).await? {
            looked += page.rows.len();
            found += existing(&page, self.database).count();
            if looked > LISTED_MAX {
                return Err(TOO_MANY);
            }
        }
        Ok(Reply::count(found))
    }

    /// `RANDOMKEY`: one of the keys that lie next to a random place between the first and the last
    /// key.
    async fn random_key(&self, mut walk: Walk) -> Answer {
        let names = |page: &Page| -> Vec<Bytes> {
            existing(page, self.database).map(|(name, _)| name).collect()
        };
        let Some(page) = self.next_page(&mut walk, CHOICE).await? else { return Ok(Reply::Nil) };
        let mut choice = names(&page);
        if let (Some(rest), Some((first, _))) = (&walk.rest, page.rows.first()) {
            // These are only the first ones.
            let scan = Scan { range: rest.clone(), backwards: true, limit: 1 };
            let end = self.page(walk.name, scan).await?;
            if let Some((last, _)) = end.rows.first() {
                let place = between(first, last).max(first.clone());
                // Most places are in gaps. Only by looking both ways are both ends of a gap found.
                let backwards = random().is_multiple_of(2);
                let range = match backwards {
                    true => KeyRange { from: first.clone(), until: Some(place) },
                    false => KeyRange { from: place, until: rest.until.clone() },
                };
                let scan = Scan { range, backwards, limit: CHOICE };
                let others = names(&self.page(walk.name, scan).await?);
                if !others.is_empty() {
                    choice = others;
                }
            }
        }
        // Those have expired.
        while choice.is_empty()
            && let Some(page) = self.next_page(&mut walk, NAMES_MAX).await?
        {
            choice = names(&page);
        }
        let many = u64::try_from(choice.len()).unwrap_or(u64::MAX).max(1);
        let place = usize::try_from(random() % many).unwrap_or(0);
        Ok(Reply::bulk_or_nil(choice.get(place)))
    }

    /// `FLUSHDB`, `FLUSHALL`
    async fn flush_keys(&self, mut walk: Walk) -> Answer {
        let mut deleted = 0;
        match self.delete_pages(&mut walk, &mut deleted).await {
            Ok(()) => Ok(Reply::OK),
            Err(failure) if deleted == 0 => Err(failure),
            Err(Failure(why)) => Err(Failure::of(format!(
                "UNKNOWN {} deleted {deleted} keys and did not finish; give it again: {why}",
                walk.name.to_uppercase()
            ))),
        }
    }

    async fn delete_pages(&self, walk: &mut Walk, deleted: &mut usize) -> Result<(), Failure> {
        while let Some(page) = self.next_page(walk, NAMES_MAX).await? {
            let names: Vec<KeyName> =
                page.rows.iter().filter_map(|(key, _)| key_name(key)).collect();
            drop(page);
            let mut parts = vec![names];
            while let Some(mut names) = parts.pop() {
                if names.is_empty() {
                    continue;
                }
                match self.delete(&names).await {
                    Ok(()) => *deleted += names.len(),
                    // The values may have grown since the scan.
                    Err(Trouble::TooLarge) if names.len() > 1 => {
                        parts.push(names.split_off(names.len() / 2));
                        parts.push(names);
                    }
                    Err(trouble) => return Err(trouble.failure()),
                }
            }
        }
        Ok(())
    }

    /// Deletes keys in one transaction.
    async fn delete(&self, names: &[KeyName]) -> Result<(), Trouble> {
        let Some(caller) = &self.caller else { return Ok(()) };
        let commands = [Command::Delete((0_u32..).take(names.len()).collect())];
        let work = Work { keys: names, commands: &commands, watched: &[] };
        match self.runner.run(caller, &work).await {
            Ok(_) => Ok(()),
            // Only the number of keys was lost.
            Err(Trouble::Failed(failure)) if failure.0.starts_with("COMMITTED ") => Ok(()),
            Err(trouble) => Err(trouble),
        }
    }

    /// `HSCAN`, `SSCAN`, `ZSCAN`: all elements at once, as Redis answers for small keys.
    async fn elements(&mut self, listing: Listing, arguments: &[Bytes]) -> Answer {
        let [key, number, rest @ ..] = arguments else { return Err(SYNTAX) };
        cursor(number)?;
        let options = Options::parse(listing, rest)?;
        let word = |text: &'static str| Bytes::from_static(text.as_bytes());
        let words = match listing {
            Listing::HScan => vec![word("hgetall"), key.clone()],
            Listing::SScan => vec![word("smembers"), key.clone()],
            Listing::ZScan
            | Listing::DbSize
            | Listing::FlushAll
            | Listing::FlushDb
            | Listing::Keys
            | Listing::RandomKey
            | Listing::Scan => {
                let span = ["0", "-1", "withscores"].map(word);
                [word("zrange"), key.clone()].into_iter().chain(span).collect()
            }
        };
        let is_wanted = |name: &Bytes| is_match(options.pattern.as_ref(), name);
        let mut found = Vec::new();
        let mut add = |name: Reply, value: Option<Reply>| {
            if matches!(&name, Reply::Bulk(name) if is_wanted(name)) {
                found.push(name);
                found.extend(value.filter(|_| !options.only_names));
            }
        };
        let reply = self.run_alone(&words).await;
        if let Reply::Error(failure) = reply {
            return Err(failure);
        } else if let Reply::Map(pairs) = reply {
            pairs.into_iter().for_each(|(name, value)| add(name, Some(value)));
        } else if let Reply::Set(members) = reply {
            members.into_iter().for_each(|member| add(member, None));
        } else if let Reply::Pairs(pairs) = reply {
            for (name, score) in pairs {
                // As text in both versions of the protocol.
                add(Reply::Bulk(name), Some(Reply::Bulk(score.to_string().into())));
            }
        }
        let end = Reply::Bulk(Bytes::from_static(b"0"));
        Ok(Reply::Array(vec![end, Reply::Array(found)]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cursor_from(from: &str, before: Option<u64>) -> Cursor {
        let rest = KeyRange { from: Key::from(from), until: None };
        Cursor { database: 3, rest, before }
    }

    #[test]
    fn cursors_are_bounded_and_the_oldest_are_dropped() {
        let mut cursors = Cursors::new(random());
        let numbers: Vec<u64> =
            (0..CURSORS_MAX + 10).map(|_| cursors.add(cursor_from("a", None))).collect();
        assert_eq!(cursors.open.len(), CURSORS_MAX);
        assert!(numbers.iter().all(|number| (1..=NUMBERS).contains(number)));
        assert_eq!(cursors.get(numbers[9], 3), None);
        assert!(cursors.get(numbers[10], 3).is_some());
        assert_eq!(cursors.get(numbers[10], 4), None, "it belongs to another database");
        assert_eq!(cursors.get(numbers[10] + NUMBERS + 1, 3), None, "it was never given");
        let long = "x".repeat(4_000);
        for _ in 0..CURSORS_MAX {
            cursors.add(cursor_from(&long, None));
            assert!(cursors.bytes <= CURSORS_BYTES_MAX);
        }
        let bytes: usize = cursors.open.values().map(Cursor::bytes).sum();
        assert_eq!(cursors.bytes, bytes);
        assert!(cursors.open.len() > 200);
    }

    #[test]
    fn an_iteration_keeps_two_cursors() {
        let mut cursors = Cursors::new(7);
        let idle = cursors.add(cursor_from("idle", None));
        let mut number = cursors.add(cursor_from("a", None));
        for _ in 0..2 * CURSORS_MAX {
            let (place, _) = cursors.get(number, 3).unwrap();
            let next = cursors.add(cursor_from("b", Some(place)));
            assert!(cursors.get(number, 3).is_some(), "the answer may have been lost");
            number = next;
        }
        assert_eq!(cursors.open.len(), 3);
        assert!(cursors.get(idle, 3).is_some());
    }

    #[test]
    fn no_cursor_has_the_number_of_the_end() {
        let mut cursors = Cursors::new(NUMBERS - 1);
        let numbers = [(); 3].map(|()| cursors.add(cursor_from("a", None)));
        assert_eq!(numbers, [NUMBERS, 1, 2]);
        assert!(numbers.iter().all(|number| cursors.get(*number, 3).is_some()));
    }

    #[test]
    fn random_places_are_between_the_keys() {
        for (low, high) in
            [("a", "b"), ("redis/0/user:1", "redis/0/user:999"), ("a", "a"), ("a", "ab")]
        {
            let (low, high) = (Key::from(low), Key::from(high));
            for _ in 0..100 {
                let place = between(&low, &high);
                assert!(place.bytes() >= low.bytes() || low.bytes().starts_with(place.bytes()));
                let most = [high.bytes(), &[0; 8]].concat();
                assert!(place.bytes() <= most.as_slice(), "{place} after {high}");
            }
        }
    }
}
