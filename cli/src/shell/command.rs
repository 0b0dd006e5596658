//! The shell's commands: their grammar and their help, in one table.

use std::time::Duration;

use orthodrome_client::{Key, KeyRange, LeaseId, Op, Priority, Value};
use orthodrome_core::NodeId;
use orthodrome_core::machine::Admin;

use super::words::{Word, split};

/// One parsed line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Command {
    /// A blank line or a comment.
    Nothing,
    Get(Vec<Key>),
    /// Reads the nearest server's values, however old.
    GetStale(Vec<Key>),
    /// Reads the keys of a range.
    Scan(Range),
    /// Counts the keys of a range.
    Count(Range),
    /// Deletes the keys of a range.
    DeleteRange(Range),
    /// Guarded operations: run at once, or added to the open transaction.
    Ops(Vec<Op>),
    /// Without keys, a general transaction.
    Begin {
        reads: Vec<Key>,
        writes: Vec<Key>,
    },
    Commit,
    Abort,
    Resolve,
    /// Grants a lease for this time.
    Lease(Duration),
    /// Sets keys and attaches them to a lease: as `Ops`.
    PutLeased(LeaseId, Vec<Op>),
    /// Renews, revokes or shows a lease.
    Renew(LeaseId),
    Revoke(LeaseId),
    ShowLease(LeaseId),
    Priority(Option<Priority>),
    Describe,
    Status,
    /// Sends this order to the leader of a partition.
    Order(Admin),
    /// Shows orders to change members, and their states.
    Orders,
    History,
    Help(Option<String>),
    Quit,
}

/// A range of keys, and how much of it to show.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Range {
    pub(super) range: KeyRange,
    pub(super) is_backwards: bool,
    /// The most keys to show; none: all.
    pub(super) limit: Option<u32>,
    pub(super) keys_only: bool,
}

/// The usage of a command.
pub(super) struct Usage {
    pub(super) name: &'static str,
    pub(super) arguments: &'static str,
    pub(super) summary: &'static str,
    /// Details for `help <name>`.
    pub(super) details: &'static str,
}

/// What the argument LEASE is.
const LEASE: &str = "LEASE is the id that `lease` printed, such as 60000-9f86d081884c7d65.";

/// Every command, in the order of `help`.
pub(super) const COMMANDS: &[Usage] = &[
    usage("get", "KEY…", "read keys as of one consistent snapshot", ""),
    usage(
        "get-stale",
        "KEY…",
        "read keys as of any consistent snapshot, however old",
        "Reads the state of the nearest server, which may miss earlier commits, even those of this shell. \
         With protocols \
         that keep\na copy of everything in each region it needs no message to another region; with \
         other protocols\nit is the same as `get`.",
    ),
    usage(
        "scan",
        "[PREFIX | FROM .. [UNTIL]] [limit N] [backwards] [keys]",
        "read the keys of a range, in order",
        "Without a range, all keys. PREFIX: all keys that begin with it. FROM .. UNTIL: from FROM up to, and \
         without, UNTIL.\n`keys` leaves the values out. What is shown at once is one consistent snapshot; a \
         long range\nis read page by page, and a line between two pages says so. Example: scan stock/ limit 20",
    ),
    usage("count", "[PREFIX | FROM .. [UNTIL]]", "count the keys of a range", ""),
    usage(
        "delete-range",
        "PREFIX | FROM .. [UNTIL]",
        "remove all keys of a range, page by page",
        "Each page is one transaction. A key that somebody creates in the meantime may stay.",
    ),
    usage(
        "put",
        "KEY VALUE [KEY VALUE…]",
        "set keys, in one transaction",
        "Quote keys and values that contain blanks: put greeting \"hello, world\"\nEscapes in double \
         quotes: \\n \\t \\\" \\\\ and \\xNN for one byte.",
    ),
    usage("delete", "KEY…", "remove keys, in one transaction", ""),
    usage(
        "lease",
        "SECONDS",
        "grant a lease: keys that are attached to it are deleted when it ends",
        "A lease ends when nobody has renewed it for SECONDS. Example:\n  lease 60\n  put-leased \
         60000-9f86d081884c7d65 session/ada online",
    ),
    usage(
        "put-leased",
        "LEASE KEY VALUE [KEY VALUE…]",
        "set keys and attach them to a lease, in one transaction",
        "In a transaction with declared keys, the keys of the lease must be declared too: use `begin` without \
         keys.",
    ),
    usage("renew", "LEASE", "renew a lease for as long as it was granted for", LEASE),
    usage("revoke", "LEASE", "revoke a lease: end it now, and delete its keys", LEASE),
    usage("show-lease", "LEASE", "show how long a lease lives, and its keys", LEASE),
    usage("add", "KEY NUMBER", "add NUMBER to a value; a missing key counts as 0", ""),
    usage("append", "KEY VALUE", "append to a value; a missing key counts as empty", ""),
    usage(
        "cas",
        "KEY EXPECTED NEW",
        "set a key to NEW if its value is EXPECTED",
        "EXPECTED `nothing`: the key must not exist. NEW `nothing`: remove the key.\nQuote \"nothing\" to \
         mean the word itself.",
    ),
    usage(
        "begin",
        "[READ…] [-> WRITE…]",
        "open a transaction, with or without declared keys",
        "With keys: `begin` reads the READ keys in one round. The shell collects put, delete, add, \
         append and cas;\n`commit` sends them in a second round. Example:\n  begin tea coffee -> tea\n  \
         add tea -1\n  commit\nDeclare keys that you read or add to on the left, and keys that you write \
         on the right.\nWithout keys: every `get` is a round of its own, and you may write any key. If the \
         protocol does not\nsupport such transactions, `commit` fails if another transaction has changed \
         a value that you read.",
    ),
    usage("commit", "", "commit the open transaction with its writes", ""),
    usage("abort", "", "abort the open transaction", ""),
    usage(
        "resolve",
        "",
        "ask again for an unknown outcome",
        "A transaction whose outcome is unknown may have committed or not. If it is still pending, \
         `resolve` ends it.",
    ),
    usage("priority", "[low|high]", "show or set the priority of the next transactions", ""),
    usage(
        "describe",
        "",
        "show the cluster: regions, round-trip times, partitions, protocol, guarantee",
        "",
    ),
    usage("status", "", "show the state of the gateway in use", ""),
    usage(
        "transfer-leader",
        "PARTITION NODE",
        "hand leadership of a partition to another of its voters",
        "The request goes to the leader of the partition, if its gateway is among --connect. It needs the \
         role\nadmin. Example: transfer-leader p0 n2",
    ),
    usage(
        "change-members",
        "PARTITION VOTER… [learners NODE…]",
        "replace the members of a partition",
        "The request goes to the leader of the partition, if its gateway is among --connect. It needs the \
         role\nadmin, and an odd number of voters. New voters copy the data first; `orders` shows when the \
         change is\nfinished. Example: change-members p0 n1 n2 n4",
    ),
    usage(
        "orders",
        "",
        "show requests to change members, and their state",
        "Each node of --connect shows its latest requests since it started. A request is pending, finished \
         or failed.\nIf the leader changes, a request may fail: repeat it.",
    ),
    usage("history", "", "show the commands of this session", ""),
    usage("help", "[COMMAND]", "show this list, or the details of one command", ""),
    usage("quit", "", "exit the shell (also: exit, Ctrl-D)", ""),
];

const fn usage(
    name: &'static str,
    arguments: &'static str,
    summary: &'static str,
    details: &'static str,
) -> Usage {
    Usage { name, arguments, summary, details }
}

/// The usage of the command called `name`.
pub(super) fn find(name: &str) -> Option<&'static Usage> {
    COMMANDS.iter().find(|usage| usage.name == name)
}

/// Parses one line.
///
/// # Errors
/// The mistake in the line, and what to write instead.
pub(super) fn parse(line: &str) -> Result<Command, String> {
    let words = split(line)?;
    let Some((name, arguments)) = words.split_first() else { return Ok(Command::Nothing) };
    let name = String::from_utf8_lossy(&name.bytes).to_lowercase();
    let name = match name.as_str() {
        "exit" => "quit",
        "del" | "rm" => "delete",
        "set" => "put",
        "rollback" => "abort",
        "?" => "help",
        other => other,
    };
    let Some(usage) = find(name) else {
        return Err(format!("unknown command {name:?}; `help` lists all commands"));
    };
    understand(usage.name, arguments)
        .ok_or_else(|| format!("usage: {} {}", usage.name, usage.arguments).trim_end().to_owned())
}

fn text(word: &Word) -> String {
    String::from_utf8_lossy(&word.bytes).into_owned()
}

fn change_members(partition: &Word, members: &[Word]) -> Option<Admin> {
    let ids = |words: &[Word]| -> Option<Vec<NodeId>> {
        words.iter().map(|word| text(word).parse().ok()).collect()
    };
    let mut sides = members.split(|word| word.is("learners"));
    let voters = ids(sides.next()?)?;
    let learners = sides.next().map_or_else(|| Some(Vec::new()), ids)?;
    if voters.is_empty() || sides.next().is_some() {
        return None;
    }
    let partition = text(partition).parse().ok()?;
    Some(Admin::ChangeMembers { partition, voters, learners })
}

/// The range that these words name: a prefix, or two keys with dots between them.
fn range(words: &[Word]) -> Option<KeyRange> {
    let key = |word: &Word| Key::from(word.bytes.clone());
    match words {
        [] => Some(KeyRange::default()),
        [prefix] if !prefix.is("..") => Some(KeyRange::prefix(&prefix.bytes)),
        [from, dots] if dots.is("..") => Some(KeyRange { from: key(from), until: None }),
        [from, dots, until] if dots.is("..") => {
            Some(KeyRange { from: key(from), until: Some(key(until)) })
        }
        _ => None,
    }
}

fn scan(mut words: &[Word]) -> Option<Range> {
    let mut wanted = Range::default();
    loop {
        words = match words {
            [before @ .., limit, number] if limit.is("limit") => {
                wanted.limit = Some(text(number).parse().ok().filter(|&number| number > 0)?);
                before
            }
            [before @ .., word] if word.is("backwards") => {
                wanted.is_backwards = true;
                before
            }
            [before @ .., word] if word.is("keys") => {
                wanted.keys_only = true;
                before
            }
            _ => break,
        };
    }
    wanted.range = range(words)?;
    Some(wanted)
}

fn put_leased(lease: &Word, pairs: &[Word]) -> Option<Command> {
    let lease: LeaseId = text(lease).parse().ok()?;
    let (pairs, rest) = pairs.as_chunks::<2>();
    if pairs.is_empty() || !rest.is_empty() {
        return None;
    }
    let put = |[key, value]: &[Word; 2]| {
        lease.put(Key::from(key.bytes.clone()), Value::from(value.bytes.clone()))
    };
    Some(Command::PutLeased(lease, pairs.iter().flat_map(put).collect()))
}

fn understand(name: &str, arguments: &[Word]) -> Option<Command> {
    let key = |word: &Word| Key::from(word.bytes.clone());
    let value = |word: &Word| Value::from(word.bytes.clone());
    let keys = |words: &[Word]| words.iter().map(key).collect::<Vec<_>>();
    let optional = |word: &Word| (!word.is("nothing")).then(|| value(word));
    Some(match (name, arguments) {
        ("get", [_, ..]) => Command::Get(keys(arguments)),
        ("get-stale", [_, ..]) => Command::GetStale(keys(arguments)),
        ("scan", words) => Command::Scan(scan(words)?),
        ("count", words) => Command::Count(Range { range: range(words)?, ..Range::default() }),
        ("delete-range", words @ [_, ..]) => {
            Command::DeleteRange(Range { range: range(words)?, ..Range::default() })
        }
        ("put", [_, ..]) => {
            let (pairs, rest) = arguments.as_chunks::<2>();
            if !rest.is_empty() {
                return None;
            }
            Command::Ops(pairs.iter().map(|[k, v]| Op::Put(key(k), value(v))).collect())
        }
        ("delete", [_, ..]) => {
            Command::Ops(arguments.iter().map(|word| Op::Delete(key(word))).collect())
        }
        ("add", [k, number]) => {
            let number = text(number).parse().ok()?;
            Command::Ops(vec![Op::Add(key(k), number)])
        }
        ("append", [k, v]) => Command::Ops(vec![Op::Append(key(k), value(v))]),
        ("cas", [k, expected, new]) => {
            let compare = Op::Compare(key(k), optional(expected));
            let write = optional(new).map_or(Op::Delete(key(k)), |value| Op::Put(key(k), value));
            Command::Ops(vec![compare, write])
        }
        ("begin", []) => Command::Begin { reads: Vec::new(), writes: Vec::new() },
        ("begin", [_, ..]) => {
            let mut sides = arguments.split(|word| word.is("->"));
            let reads = keys(sides.next().unwrap_or_default());
            let writes = keys(sides.next().unwrap_or_default());
            if sides.next().is_some() || (reads.is_empty() && writes.is_empty()) {
                return None;
            }
            Command::Begin { reads, writes }
        }
        ("priority", []) => Command::Priority(None),
        ("priority", [level]) => Command::Priority(Some(match text(level).as_str() {
            "low" => Priority::LOW,
            "high" => Priority::HIGH,
            _ => return None,
        })),
        ("lease", [seconds]) => {
            Command::Lease(Duration::try_from_secs_f64(text(seconds).parse().ok()?).ok()?)
        }
        ("put-leased", [lease, pairs @ ..]) => put_leased(lease, pairs)?,
        ("renew", [lease]) => Command::Renew(text(lease).parse().ok()?),
        ("revoke", [lease]) => Command::Revoke(text(lease).parse().ok()?),
        ("show-lease", [lease]) => Command::ShowLease(text(lease).parse().ok()?),
        ("help", []) => Command::Help(None),
        ("help", [topic]) => Command::Help(Some(text(topic))),
        ("commit", []) => Command::Commit,
        ("abort", []) => Command::Abort,
        ("resolve", []) => Command::Resolve,
        ("describe", []) => Command::Describe,
        ("status", []) => Command::Status,
        ("transfer-leader", [partition, to]) => Command::Order(Admin::TransferLeader {
            partition: text(partition).parse().ok()?,
            to: text(to).parse().ok()?,
        }),
        ("change-members", [partition, members @ ..]) => {
            Command::Order(change_members(partition, members)?)
        }
        ("orders", []) => Command::Orders,
        ("history", []) => Command::History,
        ("quit", []) => Command::Quit,
        (_, _) => return None,
    })
}

#[cfg(test)]
mod tests {
    use orthodrome_core::PartitionId;

    use super::*;

    #[test]
    fn every_command_has_its_form() {
        let cas = |expected: Option<&str>, write| {
            Command::Ops(vec![Op::Compare("k".into(), expected.map(Value::from)), write])
        };
        let of = |range| Range { range, ..Range::default() };
        for (line, expected) in [
            ("", Command::Nothing),
            ("  # a remark", Command::Nothing),
            ("GET a b", Command::Get(vec!["a".into(), "b".into()])),
            ("get-stale a b", Command::GetStale(vec!["a".into(), "b".into()])),
            ("put a 1", Command::Ops(vec![Op::Put("a".into(), "1".into())])),
            ("add a -3", Command::Ops(vec![Op::Add("a".into(), -3)])),
            ("rm a", Command::Ops(vec![Op::Delete("a".into())])),
            ("cas k 1 2", cas(Some("1"), Op::Put("k".into(), "2".into()))),
            ("cas k nothing 2", cas(None, Op::Put("k".into(), "2".into()))),
            ("cas k \"nothing\" 2", cas(Some("nothing"), Op::Put("k".into(), "2".into()))),
            ("cas k 'nothing' nothing", cas(Some("nothing"), Op::Delete("k".into()))),
            (
                "begin '->' -> c",
                Command::Begin { reads: vec!["->".into()], writes: vec!["c".into()] },
            ),
            ("cas k 1 nothing", cas(Some("1"), Op::Delete("k".into()))),
            (
                "begin a b -> c",
                Command::Begin { reads: vec!["a".into(), "b".into()], writes: vec!["c".into()] },
            ),
            ("begin a", Command::Begin { reads: vec!["a".into()], writes: vec![] }),
            ("begin -> c", Command::Begin { reads: vec![], writes: vec!["c".into()] }),
            ("begin", Command::Begin { reads: vec![], writes: vec![] }),
            ("priority high", Command::Priority(Some(Priority::HIGH))),
            (
                "transfer-leader p3 n2",
                Command::Order(Admin::TransferLeader { partition: PartitionId(3), to: NodeId(2) }),
            ),
            (
                "change-members p0 n1 n2 n4",
                Command::Order(Admin::ChangeMembers {
                    partition: PartitionId(0),
                    voters: [1, 2, 4].map(NodeId).into(),
                    learners: vec![],
                }),
            ),
            (
                "change-members p0 n1 learners n5 n6",
                Command::Order(Admin::ChangeMembers {
                    partition: PartitionId(0),
                    voters: vec![NodeId(1)],
                    learners: [5, 6].map(NodeId).into(),
                }),
            ),
            ("orders", Command::Orders),
            ("lease 2.5", Command::Lease(Duration::from_millis(2_500))),
            ("put-leased 2500-0000000000000007 k v", {
                let lease: LeaseId = "2500-0000000000000007".parse().unwrap();
                Command::PutLeased(lease, lease.put("k".into(), "v".into()))
            }),
            (
                "revoke 2500-0000000000000007",
                Command::Revoke("2500-0000000000000007".parse().unwrap()),
            ),
            ("exit", Command::Quit),
            ("scan", Command::Scan(Range::default())),
            (
                "scan b .. d limit 5 backwards keys",
                Command::Scan(Range {
                    range: KeyRange { from: "b".into(), until: Some("d".into()) },
                    is_backwards: true,
                    limit: Some(5),
                    keys_only: true,
                }),
            ),
            ("count stock/", Command::Count(of(KeyRange::prefix(b"stock/")))),
            (
                "delete-range b ..",
                Command::DeleteRange(of(KeyRange { from: "b".into(), until: None })),
            ),
        ] {
            assert_eq!(parse(line), Ok(expected), "{line}");
        }
    }

    #[test]
    fn mistakes_are_answered_with_the_right_form() {
        for (line, expected) in [
            ("jump", "unknown command \"jump\""),
            ("get", "usage: get KEY…"),
            ("get-stale", "usage: get-stale KEY…"),
            ("put a", "usage: put KEY VALUE"),
            ("put a 1 b", "usage: put KEY VALUE"),
            ("add a x", "usage: add KEY NUMBER"),
            ("begin ->", "usage: begin [READ…] [-> WRITE…]"),
            ("begin a -> b -> c", "usage: begin"),
            ("commit now", "usage: commit"),
            ("transfer-leader 0 n1", "usage: transfer-leader PARTITION NODE"),
            ("change-members p0", "usage: change-members PARTITION VOTER…"),
            ("change-members p0 learners n1", "usage: change-members PARTITION VOTER…"),
            ("priority urgent", "usage: priority [low|high]"),
            ("lease soon", "usage: lease SECONDS"),
            ("lease -1", "usage: lease SECONDS"),
            ("renew 2500", "usage: renew LEASE"),
            ("put-leased 2500-0000000000000007 k", "usage: put-leased LEASE KEY VALUE"),
            ("scan a b", "usage: scan [PREFIX | FROM .. [UNTIL]]"),
            ("scan limit 0", "usage: scan [PREFIX | FROM .. [UNTIL]]"),
            ("delete-range", "usage: delete-range PREFIX"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.starts_with(expected), "{line}: {error}");
        }
    }

    #[test]
    fn every_command_of_the_list_exists() {
        for usage in COMMANDS {
            let line = format!("{} a 1 2", usage.name);
            let order = format!("{} p0 n1", usage.name);
            let parsed = [
                usage.name,
                &format!("{} a", usage.name),
                &line,
                &format!("{} a 1", usage.name),
                &format!("{} 5", usage.name),
                &order,
            ]
            .map(parse);
            let lease = ["", " k v"]
                .map(|more| parse(&format!("{} 2500-0000000000000007{more}", usage.name)));
            let known = parsed.iter().chain(&lease).any(Result::is_ok);
            assert!(known || usage.name == "priority", "{}: {parsed:?}", usage.name);
        }
    }
}
