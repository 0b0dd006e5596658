//! Commands that are no part of a transaction on data: the connection, transactions, what clients ask
//! when they connect, and commands that list keys, which `listing` answers.

use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use orthodrome_core::procedure::redis::reply::{Failure, NOT_INTEGER, Reply, SYNTAX};
use orthodrome_core::procedure::redis::script::REDIS_VERSION;
use orthodrome_core::procedure::redis::{COMMANDS, Spec, number, wrong_arity};

use super::blocking::Blocking;
use super::connection::{Connection, DATABASES};
use super::listing::Listing;
use super::messages::{Kind, Subscriber};
use super::reply::Version;

/// Wrong credentials after which a connection is closed.
const FAILURES_MAX: u32 = 10;

/// A command that is no part of a transaction on data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Local {
    Auth,
    Blocking(Blocking),
    Client,
    Command,
    Config,
    Discard,
    Echo,
    Exec,
    Hello,
    Info,
    Listing(Listing),
    Multi,
    Ping,
    PubSub,
    Quit,
    Reset,
    Script,
    Select,
    Subscribe(Kind),
    Time,
    Unsubscribe(Kind),
    Unwatch,
    Watch,
}

/// A command on the connection that may be queued after `MULTI`, and runs at `EXEC`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Deferred {
    Client,
    Select,
}

/// Names, with the number of words as in Redis: the smallest number if it is negative.
const LOCALS: [(&str, i64, Local); 42] = [
    ("auth", -2, Local::Auth),
    ("blmove", 6, Local::Blocking(Blocking::Move)),
    ("blmpop", -5, Local::Blocking(Blocking::Elements)),
    ("blpop", -3, Local::Blocking(Blocking::First)),
    ("brpop", -3, Local::Blocking(Blocking::Last)),
    ("brpoplpush", 4, Local::Blocking(Blocking::MoveLast)),
    ("bzmpop", -5, Local::Blocking(Blocking::Members)),
    ("bzpopmax", -3, Local::Blocking(Blocking::Highest)),
    ("bzpopmin", -3, Local::Blocking(Blocking::Lowest)),
    ("client", -2, Local::Client),
    ("command", -1, Local::Command),
    ("config", -2, Local::Config),
    ("dbsize", 1, Local::Listing(Listing::DbSize)),
    ("discard", 1, Local::Discard),
    ("echo", 2, Local::Echo),
    ("exec", 1, Local::Exec),
    ("flushall", -1, Local::Listing(Listing::FlushAll)),
    ("flushdb", -1, Local::Listing(Listing::FlushDb)),
    ("hello", -1, Local::Hello),
    ("hscan", -3, Local::Listing(Listing::HScan)),
    ("info", -1, Local::Info),
    ("keys", 2, Local::Listing(Listing::Keys)),
    ("multi", 1, Local::Multi),
    ("ping", -1, Local::Ping),
    ("psubscribe", -2, Local::Subscribe(Kind::Pattern)),
    ("pubsub", -2, Local::PubSub),
    ("punsubscribe", -1, Local::Unsubscribe(Kind::Pattern)),
    ("quit", -1, Local::Quit),
    ("randomkey", 1, Local::Listing(Listing::RandomKey)),
    ("reset", 1, Local::Reset),
    ("scan", -2, Local::Listing(Listing::Scan)),
    ("script", -2, Local::Script),
    ("select", 2, Local::Select),
    ("ssubscribe", -2, Local::Subscribe(Kind::Shard)),
    ("sscan", -3, Local::Listing(Listing::SScan)),
    ("subscribe", -2, Local::Subscribe(Kind::Channel)),
    ("sunsubscribe", -1, Local::Unsubscribe(Kind::Shard)),
    ("time", 1, Local::Time),
    ("unsubscribe", -1, Local::Unsubscribe(Kind::Channel)),
    ("unwatch", 1, Local::Unwatch),
    ("watch", -2, Local::Watch),
    ("zscan", -3, Local::Listing(Listing::ZScan)),
];

/// Commands of Redis that this server does not have, and why.
const MISSING: [(&str, &[&str]); 5] = [
    (
        "functions are not supported; scripts are (EVAL, EVALSHA)",
        &["function", "fcall", "fcall_ro"],
    ),
    (
        "streams are not supported",
        &[
            "xadd",
            "xread",
            "xreadgroup",
            "xrange",
            "xrevrange",
            "xlen",
            "xdel",
            "xack",
            "xgroup",
            "xinfo",
            "xpending",
            "xclaim",
            "xautoclaim",
            "xtrim",
            "xsetid",
        ],
    ),
    (
        "other commands on bits, estimates and places are not supported",
        &[
            "bitop",
            "bitpos",
            "bitfield",
            "bitfield_ro",
            "pfadd",
            "pfcount",
            "pfmerge",
            "geoadd",
            "geodist",
            "geohash",
            "geopos",
            "georadius",
            "georadiusbymember",
            "geosearch",
            "geosearchstore",
        ],
    ),
    (
        "the cluster is operated with `orthodrome`, and every transaction is durable",
        &[
            "cluster",
            "readonly",
            "readwrite",
            "replicaof",
            "slaveof",
            "role",
            "sync",
            "psync",
            "wait",
            "waitaof",
            "save",
            "bgsave",
            "bgrewriteaof",
            "lastsave",
            "shutdown",
            "failover",
            "acl",
            "debug",
            "slowlog",
            "latency",
            "memory",
            "module",
            "swapdb",
            "move",
            "migrate",
            "dump",
            "restore",
            "asking",
        ],
    ),
    (
        "it is not supported",
        &["monitor", "sort", "sort_ro", "lcs", "hexpire", "hpexpire", "httl", "hpttl", "hpersist"],
    ),
];

/// The command on data with this name.
pub(super) fn spec(words: &[Bytes]) -> Option<&'static Spec> {
    let name = words.first()?;
    COMMANDS.iter().find(|spec| name.eq_ignore_ascii_case(spec.name.as_bytes()))
}

/// The error for a command that does not exist here.
pub(super) fn unknown(words: &[Bytes]) -> Failure {
    let is =
        |name: &str| words.first().is_some_and(|word| word.eq_ignore_ascii_case(name.as_bytes()));
    for (why, names) in MISSING {
        if let Some(name) = names.iter().find(|name| is(name)) {
            return Failure::of(format!("ERR command '{name}' is not available here: {why}"));
        }
    }
    let shown = |word: &Bytes| {
        let part = word.get(..word.len().min(128)).unwrap_or_default();
        String::from_utf8_lossy(part).into_owned()
    };
    let name = words.first().map(shown).unwrap_or_default();
    let arguments: String =
        words.iter().skip(1).take(8).map(|word| format!("'{}' ", shown(word))).collect();
    Failure::of(format!("ERR unknown command '{name}', with args beginning with: {arguments}"))
}

impl Local {
    /// The command with this name.
    pub(super) fn find(name: &[u8]) -> Option<Self> {
        let mut all = LOCALS.iter();
        let found = all.find(|(local, ..)| name.eq_ignore_ascii_case(local.as_bytes()))?;
        Some(found.2)
    }

    /// True if a client may give it before it has shown its credential.
    pub(super) fn is_for_strangers(self) -> bool {
        matches!(self, Self::Auth | Self::Hello | Self::Quit | Self::Reset)
    }

    pub(super) fn name(self) -> &'static str {
        LOCALS.iter().find(|(.., local)| *local == self).map_or("", |(name, ..)| name)
    }

    /// Whether it has this number of words, the name included.
    fn fits(self, count: usize) -> bool {
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        LOCALS.iter().any(|(_, arity, local)| {
            *local == self && if *arity < 0 { count >= -arity } else { count == *arity }
        })
    }

    /// True if it may stand between `MULTI` and `EXEC`, or ends the transaction.
    fn is_for_transactions(self) -> bool {
        matches!(
            self,
            Self::Client
                | Self::Echo
                | Self::Ping
                | Self::Select
                | Self::Time
                | Self::Exec
                | Self::Discard
                | Self::Reset
                | Self::Quit
                | Self::Multi
                | Self::Watch
                | Self::Unwatch
        )
    }
}

fn error(text: &'static str) -> Reply {
    Reply::Error(Failure::new(text))
}

fn text(text: impl Into<String>) -> Reply {
    Reply::Bulk(Bytes::from(text.into()))
}

impl Connection {
    /// Adds a command on the connection to the transaction since `MULTI`. It runs at `EXEC`.
    fn queue_local(&mut self, local: Deferred, arguments: &[Bytes]) {
        if local == Deferred::Client
            && let Err(failure) = client_subcommand(arguments)
        {
            return self.refuse(failure);
        }
        self.defer(local, arguments);
        if let (Deferred::Select, Some(Ok(number))) = (local, arguments.first().map(database))
            && let Some(queue) = &mut self.multi
        {
            // The keys of the commands after it.
            queue.select(number);
        }
    }

    /// Runs a command that `queue_local` has queued.
    pub(super) fn run_local(&mut self, local: Deferred, arguments: &[Bytes]) -> Reply {
        match local {
            Deferred::Select => self.select(arguments),
            Deferred::Client => self.client(arguments),
        }
    }

    /// Answers a command that is no part of a transaction on data.
    pub(super) async fn local(&mut self, local: Local, arguments: &[Bytes]) {
        if !local.fits(arguments.len() + 1) {
            return self.refuse(wrong_arity(local.name()));
        }
        if self.multi.is_some() && !local.is_for_transactions() {
            let name = local.name().to_uppercase();
            return self.refuse(Failure::of(format!("ERR {name} is not allowed in transactions")));
        }
        match (local, arguments) {
            (Local::Ping, [] | [_]) if self.is_subscribed_mode() => {
                let given = arguments.first().cloned().unwrap_or_default();
                return self.reply(Reply::Array(vec![text("pong"), Reply::Bulk(given)]));
            }
            (Local::Ping, []) => return self.reply(Reply::Status("PONG")),
            (Local::Ping | Local::Echo, [one]) => return self.reply(Reply::Bulk(one.clone())),
            (Local::Time, _) => return self.reply(time()),
            // It is queued, and does nothing at `EXEC`, which ends all watching anyway.
            (Local::Unwatch, _) if self.multi.is_some() => return self.reply(Reply::OK),
            (Local::Select, _) if self.multi.is_some() => {
                return self.queue_local(Deferred::Select, arguments);
            }
            (Local::Client, _) if self.multi.is_some() => {
                return self.queue_local(Deferred::Client, arguments);
            }
            _ => {}
        }
        // Everything else follows the answers to the requests before it.
        self.flush().await;
        let answer = match local {
            Local::Subscribe(kind) => return self.subscribe(kind, arguments).await,
            Local::Unsubscribe(kind) => return self.unsubscribe(kind, arguments),
            Local::Blocking(command) => return self.block(command, arguments).await,
            Local::PubSub => self.pubsub(arguments),
            Local::Ping | Local::Echo | Local::Time => Reply::Error(wrong_arity(local.name())),
            Local::Auth => self.auth(arguments),
            Local::Hello => self.hello(arguments),
            Local::Select => self.select(arguments),
            Local::Client => self.client(arguments),
            Local::Config => config(arguments),
            Local::Command => command(arguments),
            Local::Info => self.info(),
            Local::Listing(listing) => self.listing(listing, local.name(), arguments).await,
            Local::Multi if self.multi.is_some() => error("ERR MULTI calls can not be nested"),
            Local::Multi => {
                self.multi = Some(self.group());
                Reply::OK
            }
            Local::Discard if self.multi.is_none() => error("ERR DISCARD without MULTI"),
            Local::Discard => {
                self.multi = None;
                self.unwatch();
                Reply::OK
            }
            Local::Exec => self.exec().await,
            Local::Watch if self.multi.is_some() => error("ERR WATCH inside MULTI is not allowed"),
            Local::Watch => self.watch(arguments).await,
            Local::Unwatch => {
                self.unwatch();
                Reply::OK
            }
            Local::Reset => self.reset(),
            Local::Script => self.script(arguments),
            Local::Quit => {
                self.is_closing = true;
                Reply::OK
            }
        };
        self.reply_now(answer).await;
    }

    /// `AUTH [name] token`
    fn auth(&mut self, arguments: &[Bytes]) -> Reply {
        let front = self.runner.front();
        if front.anybody().is_some() {
            return error(
                "ERR AUTH <password> called without any password configured for the default user. \
                 Are you sure your configuration is correct?",
            );
        }
        let (name, token) = match arguments {
            [token] => (None, token),
            [name, token] if name.eq_ignore_ascii_case(b"default") => (None, token),
            [name, token] => (Some(name.as_ref()), token),
            _ => return Reply::Error(SYNTAX),
        };
        match front.by_token(name, token) {
            Some(caller) => {
                self.caller = Some(caller);
                self.check_subscriptions();
                Reply::OK
            }
            None => {
                self.failures += 1;
                self.is_closing |= self.failures >= FAILURES_MAX;
                error("WRONGPASS invalid username-password pair or user is disabled.")
            }
        }
    }

    /// `HELLO [version [AUTH name token] [SETNAME name]]`
    fn hello(&mut self, arguments: &[Bytes]) -> Reply {
        let mut version = self.version;
        let mut rest = arguments;
        if let Some((first, others)) = rest.split_first() {
            version = match number::integer(first) {
                Some(2) => Version::Two,
                Some(3) => Version::Three,
                Some(_) => return error("NOPROTO unsupported protocol version"),
                None => return error("ERR Protocol version is not an integer or out of range"),
            };
            rest = others;
        }
        let mut name = None;
        loop {
            rest = match rest {
                [] => break,
                [word, user, token, others @ ..] if word.eq_ignore_ascii_case(b"auth") => {
                    let answer = self.auth(&[user.clone(), token.clone()]);
                    if matches!(answer, Reply::Error(_)) {
                        return answer;
                    }
                    others
                }
                [word, given, others @ ..] if word.eq_ignore_ascii_case(b"setname") => {
                    name = Some(given.clone());
                    others
                }
                _ => return Reply::Error(SYNTAX),
            };
        }
        if self.caller.is_none() {
            return error(
                "NOAUTH HELLO must be called with the client already authenticated, otherwise the \
                 HELLO <proto> AUTH <user> <pass> option can be used to authenticate the client \
                 and select the RESP protocol version at the same time",
            );
        }
        if let Some(name) = name {
            let answer = self.set_name(&name);
            if matches!(answer, Reply::Error(_)) {
                return answer;
            }
        }
        self.version = version;
        let proto = if version == Version::Three { 3 } else { 2 };
        Reply::Map(vec![
            (text("server"), text("redis")),
            (text("version"), text(REDIS_VERSION)),
            (text("proto"), Reply::Integer(proto)),
            (text("id"), Reply::Integer(i64::try_from(self.number).unwrap_or(i64::MAX))),
            (text("mode"), text("standalone")),
            (text("role"), text("master")),
            (text("modules"), Reply::Array(Vec::new())),
        ])
    }

    fn select(&mut self, arguments: &[Bytes]) -> Reply {
        match arguments.first().map(database) {
            None => Reply::Error(SYNTAX),
            Some(Err(failure)) => Reply::Error(failure),
            Some(Ok(number)) => {
                self.database = number;
                Reply::OK
            }
        }
    }

    fn set_name(&mut self, name: &Bytes) -> Reply {
        if name.len() > 1_024 || !name.iter().all(u8::is_ascii_graphic) {
            return error(
                "ERR Client names cannot contain spaces, newlines or special characters.",
            );
        }
        self.name = name.clone();
        Reply::OK
    }

    fn client(&mut self, arguments: &[Bytes]) -> Reply {
        let word = match client_subcommand(arguments) {
            Ok(word) => word,
            Err(failure) => return Reply::Error(failure),
        };
        match (word, arguments.get(1..).unwrap_or_default()) {
            ("id", []) => Reply::Integer(i64::try_from(self.number).unwrap_or(i64::MAX)),
            ("getname", []) if self.name.is_empty() => Reply::Nil,
            ("getname", []) => Reply::Bulk(self.name.clone()),
            ("setname", [name]) => self.set_name(name),
            ("setinfo", [_, _]) | ("no-evict" | "no-touch", [_]) => Reply::OK,
            ("info", []) => {
                let name = String::from_utf8_lossy(&self.name).into_owned();
                let (number, database) = (self.number, self.database);
                let resp = if self.version == Version::Three { 3 } else { 2 };
                let own = self.subscriber.as_ref().map(Subscriber::counts);
                let (channels, patterns, shards) = own.unwrap_or_default();
                text(format!(
                    "id={number} name={name} db={database} sub={channels} psub={patterns} \
                     ssub={shards} resp={resp}\n"
                ))
            }
            _ => Reply::Error(SYNTAX),
        }
    }

    fn reset(&mut self) -> Reply {
        self.multi = None;
        self.unwatch();
        self.subscriber = None;
        self.database = 0;
        self.version = Version::Two;
        self.name = Bytes::new();
        if self.caller.is_some() {
            // A stranger gains no time.
            self.stranger_since = tokio::time::Instant::now();
        }
        self.caller = self.holder.clone();
        Reply::Status("RESET")
    }

    fn info(&self) -> Reply {
        let front = self.runner.front();
        let (channels, patterns, shards) = self.runner.hub().counts();
        let about = front.describe();
        text(format!(
            "# Server\r\nredis_version:{REDIS_VERSION}\r\nredis_mode:standalone\r\n\
             orthodrome_version:{}\r\nuptime_in_seconds:{}\r\n\r\n\
             # Clients\r\nconnected_clients:{}\r\n\r\n\
             # Stats\r\npubsub_channels:{channels}\r\npubsub_patterns:{patterns}\r\n\
             pubsubshard_channels:{shards}\r\n\r\n\
             # Persistence\r\nloading:0\r\naof_enabled:1\r\n\r\n\
             # Replication\r\nrole:master\r\nconnected_slaves:0\r\n\r\n\
             # Orthodrome\r\ncluster:{}\r\nprotocol:{}\r\nguarantee:{}\r\nregion:{}\r\nnode:{}\r\n",
            env!("CARGO_PKG_VERSION"),
            front.uptime().as_secs(),
            front.redis_connections().get(),
            about.cluster,
            about.protocol,
            about.guarantee,
            about.region,
            about.node,
        ))
    }
}

pub(super) fn subcommand(command: &str, word: &str) -> Failure {
    let word: String = word.chars().take(64).collect();
    Failure::of(format!(
        "ERR unknown subcommand '{word}'. '{command}' has fewer subcommands here than in Redis."
    ))
}

/// The database with this number.
fn database(word: &Bytes) -> Result<u8, Failure> {
    let number = number::integer(word).ok_or(NOT_INTEGER)?;
    let number = u8::try_from(number).ok().filter(|number| *number < DATABASES);
    number.ok_or(Failure::new("ERR DB index is out of range"))
}

/// The subcommands of `CLIENT`, each with the number of its arguments.
const CLIENT: [(&str, usize); 7] = [
    ("getname", 0),
    ("id", 0),
    ("info", 0),
    ("no-evict", 1),
    ("no-touch", 1),
    ("setinfo", 2),
    ("setname", 1),
];

/// The subcommand of `CLIENT` that these arguments name.
fn client_subcommand(arguments: &[Bytes]) -> Result<&'static str, Failure> {
    let (first, rest) = arguments.split_first().ok_or(SYNTAX)?;
    let mut all = CLIENT.iter();
    let found = all.find(|(name, _)| first.eq_ignore_ascii_case(name.as_bytes()));
    match found {
        None => Err(subcommand("client", &String::from_utf8_lossy(first).to_ascii_lowercase())),
        Some((name, count)) if rest.len() == *count => Ok(name),
        Some((name, _)) => Err(wrong_arity(&format!("client|{name}"))),
    }
}

fn time() -> Reply {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Reply::Array(vec![text(since.as_secs().to_string()), text(since.subsec_micros().to_string())])
}

/// Settings that clients and `redis-benchmark` ask for.
const SETTINGS: [(&str, &str); 5] = [
    ("appendfsync", "always"),
    ("appendonly", "yes"),
    ("databases", "16"),
    ("maxmemory", "0"),
    ("save", ""),
];

fn config(arguments: &[Bytes]) -> Reply {
    let Some((first, patterns)) = arguments.split_first() else { return Reply::Error(SYNTAX) };
    if !first.eq_ignore_ascii_case(b"get") || patterns.is_empty() {
        let word = String::from_utf8_lossy(first).to_ascii_lowercase();
        return Reply::Error(subcommand("config", &word));
    }
    let is_wanted = |name: &str| {
        patterns.iter().any(|pattern| {
            pattern.eq_ignore_ascii_case(b"*") || pattern.eq_ignore_ascii_case(name.as_bytes())
        })
    };
    let wanted = SETTINGS.into_iter().filter(|(name, _)| is_wanted(name));
    Reply::Map(wanted.map(|(name, value)| (text(name), text(value))).collect())
}

/// One line of `COMMAND`.
fn described(name: &str, arity: i64, flags: &[&'static str], keys: (i64, i64, i64)) -> Reply {
    let (first, last, step) = keys;
    Reply::Array(vec![
        text(name),
        Reply::Integer(arity),
        Reply::Set(flags.iter().map(|flag| Reply::Status(flag)).collect()),
        Reply::Integer(first),
        Reply::Integer(last),
        Reply::Integer(step),
    ])
}

/// Commands whose first key is at a fixed position. The others follow their number.
const MOVABLE: [&str; 3] = ["zunionstore", "zinterstore", "zdiffstore"];

/// Every command.
fn descriptions() -> Vec<(&'static str, Reply)> {
    let data = COMMANDS.iter().map(|spec| {
        let flags: &[&str] = match (spec.keys == (0, 0, 0), spec.is_read_only) {
            _ if spec.name.ends_with("publish") => &["pubsub", "loading", "stale", "fast"],
            (false, false) if MOVABLE.contains(&spec.name) => &["write", "movablekeys"],
            (false, true) => &["readonly"],
            (false, false) => &["write"],
            // The keys follow their number.
            (true, true) if !spec.name.starts_with("eval") => &["readonly", "movablekeys"],
            (true, false) if !spec.name.starts_with("eval") => &["write", "movablekeys"],
            (true, true) => &["readonly", "noscript", "movablekeys"],
            (true, false) => &["noscript", "movablekeys"],
        };
        (spec.name, described(spec.name, spec.arity, flags, spec.keys))
    });
    let locals = LOCALS.iter().map(|(name, arity, local)| {
        let (flags, keys): (&[&str], _) = match local {
            Local::Listing(listing) if listing.is_write() => (&["write"], (0, 0, 0)),
            Local::Listing(listing) if listing.has_key() => (&["readonly"], (1, 1, 1)),
            Local::Listing(_) => (&["readonly"], (0, 0, 0)),
            Local::Blocking(command) if command.key_places() == (0, 0, 0) => {
                (&["write", "noscript", "blocking", "movablekeys"], (0, 0, 0))
            }
            Local::Blocking(command) => (&["write", "noscript", "blocking"], command.key_places()),
            Local::PubSub => (&["pubsub", "loading", "stale"], (0, 0, 0)),
            Local::Subscribe(_) | Local::Unsubscribe(_) => {
                (&["pubsub", "noscript", "loading", "stale"], (0, 0, 0))
            }
            Local::Auth
            | Local::Client
            | Local::Command
            | Local::Config
            | Local::Discard
            | Local::Echo
            | Local::Exec
            | Local::Hello
            | Local::Info
            | Local::Multi
            | Local::Ping
            | Local::Quit
            | Local::Reset
            | Local::Script
            | Local::Select
            | Local::Time
            | Local::Unwatch
            | Local::Watch => (&["fast"], (0, 0, 0)),
        };
        (*name, described(name, *arity, flags, keys))
    });
    data.chain(locals).collect()
}

fn command(arguments: &[Bytes]) -> Reply {
    let all = descriptions();
    let Some((first, rest)) = arguments.split_first() else {
        return Reply::Array(all.into_iter().map(|(_, line)| line).collect());
    };
    let word = String::from_utf8_lossy(first).to_ascii_lowercase();
    match (word.as_str(), rest) {
        ("count", []) => Reply::count(all.len()),
        ("list", []) => Reply::Array(all.into_iter().map(|(name, _)| text(name)).collect()),
        // The help of `redis-cli` works without.
        ("docs", _) => Reply::Map(Vec::new()),
        ("info", names) => {
            let find = |name: &Bytes| {
                let mut all = all.iter();
                let found = all.find(|(own, _)| name.eq_ignore_ascii_case(own.as_bytes()));
                found.map_or(Reply::NilArray, |(_, line)| line.clone())
            };
            Reply::Array(names.iter().map(find).collect())
        }
        _ => Reply::Error(subcommand("command", &word)),
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::ordered::OrdSet;

    use super::*;

    #[test]
    fn every_name_has_one_meaning() {
        let data = COMMANDS.iter().map(|spec| spec.name);
        let locals = LOCALS.iter().map(|(name, ..)| *name);
        let missing = MISSING.iter().flat_map(|(_, names)| names.iter().copied());
        let mut seen = OrdSet::new();
        for name in data.chain(locals).chain(missing) {
            assert!(seen.insert(name), "{name} is listed twice");
            assert_eq!(name, name.to_lowercase());
        }
    }

    #[test]
    fn what_is_missing_is_refused_by_name() {
        let refused = |line: &str| {
            let words: Vec<Bytes> = line.split(' ').map(|word| word.to_owned().into()).collect();
            unknown(&words).0.into_owned()
        };
        assert_eq!(
            refused("FCALL x 0"),
            "ERR command 'fcall' is not available here: functions are not supported; scripts are \
             (EVAL, EVALSHA)"
        );
        assert_eq!(
            refused("fly away now"),
            "ERR unknown command 'fly', with args beginning with: 'away' 'now' "
        );
    }
}
