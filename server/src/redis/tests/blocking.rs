//! Blocking commands: `BLPOP` and its relatives.

use super::*;

impl Rig {
    /// Waits until this number of transactions have begun since [`Rig::begun`].
    async fn tries(&self, many: usize) {
        let reached = async {
            while self.memory.0.lock().unwrap().begun.len() < many {
                tokio::task::yield_now().await;
            }
        };
        let reached = tokio::time::timeout(Duration::from_secs(30), reached).await;
        reached.unwrap_or_else(|_| panic!("awaited {many} transactions: {:?}", self.begun()));
        assert_eq!(self.begun().len(), many);
    }

    /// Writes the value of one key to another, and shows it to no watch.
    fn copy(&self, from: &str, to: &str) {
        let mut state = self.memory.0.lock().unwrap();
        let value = state.values[&Key::from(from)].clone();
        state.values.insert(to.into(), value);
    }

    /// A blocked client: its command has run, looked, and found nothing.
    async fn blocked(&self, line: &str) -> TcpStream {
        self.blocked_after(2, line).await
    }

    /// A client that is blocked on keys on which others are blocked: it has only looked.
    async fn blocked_in_line(&self, line: &str) -> TcpStream {
        self.blocked_after(1, line).await
    }

    async fn blocked_after(&self, transactions: usize, line: &str) -> TcpStream {
        self.begun();
        let mut client = self.client().await;
        client.write_all(format!("{line}\r\n").as_bytes()).await.unwrap();
        self.tries(transactions).await;
        client
    }
}

const WRONG: &str = "-WRONGTYPE Operation against a key holding the wrong kind of value\r\n";

#[tokio::test]
async fn a_blocking_command_that_finds_an_element_answers_at_once() {
    let rig = open().await;
    let mut client = rig.client().await;
    talk(&mut client, "RPUSH q a b c\r\nSET s 1\r\n", ":3\r\n+OK\r\n").await;
    talk(&mut client, "BLPOP none q 0\r\n", "*2\r\n$1\r\nq\r\n$1\r\na\r\n").await;
    talk(&mut client, "BRPOP q none 0\r\n", "*2\r\n$1\r\nq\r\n$1\r\nc\r\n").await;
    talk(&mut client, "BLMOVE q other LEFT RIGHT 0\r\n", "$1\r\nb\r\n").await;
    talk(&mut client, "BRPOPLPUSH other q 0\r\n", "$1\r\nb\r\n").await;
    talk(&mut client, "BLPOP none s q 0\r\nBLMOVE s q LEFT LEFT 0\r\n", &WRONG.repeat(2)).await;
    let lines = "ZADD z 1.5 low 2 high\r\nBZPOPMAX z 1\r\nHELLO 3\r\n";
    client.write_all(lines.as_bytes()).await.unwrap();
    let told = ask(&mut client, "BZPOPMIN none z 0").await;
    assert!(told.starts_with(":2\r\n*3\r\n$1\r\nz\r\n$4\r\nhigh\r\n$1\r\n2\r\n"), "{told}");
    assert!(told.ends_with("*3\r\n$1\r\nz\r\n$3\r\nlow\r\n,1.5\r\n"), "{told}");
    assert_eq!(rig.watches_begun(), 0);
}

#[tokio::test]
async fn time_outs_of_blocking_commands_are_checked_as_in_redis() {
    let rig = open().await;
    let mut client = rig.client().await;
    for (time, told) in [
        ("-1", "timeout is negative"),
        ("1e400", "timeout is negative"),
        ("1e16", "timeout is negative"),
        ("x", "timeout is not a float or out of range"),
        ("nan", "timeout is not a float or out of range"),
    ] {
        talk(&mut client, &format!("BLPOP q {time}\r\n"), &format!("-ERR {told}\r\n")).await;
    }
    talk(&mut client, "BLMOVE a b LEFT UP 1\r\n", "-ERR syntax error\r\n").await;
    let told = "-ERR wrong number of arguments for 'blpop' command\r\n";
    talk(&mut client, "BLPOP q\r\n", told).await;
    talk(&mut client, "MULTI\r\n", "+OK\r\n").await;
    let told = "-ERR BLPOP is not allowed in transactions\r\n";
    talk(&mut client, "BLPOP q 0\r\nDISCARD\r\n", &format!("{told}+OK\r\n")).await;
    // Nobody pushes.
    for line in ["BLPOP q r 0.01", "BZPOPMIN q 0.01", "BLMOVE q r LEFT LEFT 0.01"] {
        talk(&mut client, &format!("{line}\r\n"), "*-1\r\n").await;
    }
    rig.no_watch().await;
}

#[tokio::test]
async fn blocked_clients_are_served_in_order() {
    let rig = open().await;
    let mut waiting = vec![rig.blocked("BLPOP r q 0\r\nPING").await];
    for _ in 0..2 {
        waiting.push(rig.blocked_in_line("BLPOP r q 0\r\nPING").await);
    }
    assert_eq!(rig.watches_begun(), 2, "one for each key");
    let mut other = rig.client().await;
    talk(&mut other, "RPUSH q a b\r\n", ":2\r\n").await;
    for (client, element) in waiting.iter_mut().zip(["a", "b"]) {
        let told = format!("*2\r\n$1\r\nq\r\n$1\r\n{element}\r\n+PONG\r\n");
        talk(client, "", &told).await;
    }
    talk(&mut other, "RPUSH r c\r\n", ":1\r\n").await;
    talk(&mut waiting[2], "", "*2\r\n$1\r\nr\r\n$1\r\nc\r\n+PONG\r\n").await;
    talk(&mut other, "EXISTS q r\r\n", ":0\r\n").await;
    rig.no_watch().await;
}

#[tokio::test]
async fn who_is_blocked_behind_others_finds_what_is_there_and_is_told_of_another_type() {
    let rig = open().await;
    let _first = rig.blocked("BLPOP q 0").await;
    talk(&mut rig.client().await, "RPUSH full a\r\nSET text 1\r\n", ":1\r\n+OK\r\n").await;
    // Unseen by the watch of the first.
    rig.copy("redis/0/full", "redis/0/q");
    talk(&mut rig.client().await, "BLPOP q 0\r\n", "*2\r\n$1\r\nq\r\n$1\r\na\r\n").await;
    rig.copy("redis/0/text", "redis/0/q");
    talk(&mut rig.client().await, "BLPOP q 0\r\n", WRONG).await;
    let wrong = "-ERR syntax error\r\n".repeat(2);
    talk(&mut rig.client().await, "BLMOVE q r UP LEFT 0\r\nBLMPOP 0 1 q UP\r\n", &wrong).await;
}

#[tokio::test]
async fn blocking_commands_for_several_elements_answer_as_those_that_do_not_block() {
    let rig = open().await;
    let mut client = rig.client().await;
    talk(&mut client, "RPUSH q a b c\r\nSET s 1\r\n", ":3\r\n+OK\r\n").await;
    let told = "*2\r\n$1\r\nq\r\n*2\r\n$1\r\na\r\n$1\r\nb\r\n";
    talk(&mut client, "BLMPOP 0 2 none q LEFT COUNT 2\r\n", told).await;
    talk(&mut client, "blmpop 1 1 q right\r\n", "*2\r\n$1\r\nq\r\n*1\r\n$1\r\nc\r\n").await;
    talk(&mut client, "BLMPOP 0 3 none s q LEFT\r\nBZMPOP 0 1 s MIN\r\n", &WRONG.repeat(2)).await;
    let lines = "ZADD z 1.5 low 2 mid 3 high\r\nBZMPOP 1 1 z MAX\r\nHELLO 3\r\n";
    client.write_all(lines.as_bytes()).await.unwrap();
    let told = ask(&mut client, "BZMPOP 0 2 none z MIN COUNT 5").await;
    let first = ":3\r\n*2\r\n$1\r\nz\r\n*1\r\n*2\r\n$4\r\nhigh\r\n$1\r\n3\r\n";
    assert!(told.starts_with(first), "{told}");
    let last = "*2\r\n$1\r\nz\r\n*2\r\n*2\r\n$3\r\nlow\r\n,1.5\r\n*2\r\n$3\r\nmid\r\n,2\r\n";
    assert!(told.ends_with(last), "{told}");
    for (line, told) in [
        ("BLMPOP x 1 q LEFT", "timeout is not a float or out of range"),
        ("BLMPOP 1 0 q LEFT", "numkeys should be greater than 0"),
        ("BZMPOP 1 a q MIN", "numkeys should be greater than 0"),
        ("BLMPOP 1 2 q LEFT", "syntax error"),
        ("BLMPOP 1 1 q MIN", "syntax error"),
        ("BLMPOP 1 1 q LEFT COUNT 0", "count should be greater than 0"),
        ("BLMPOP 1 1 q LEFT COUNT", "syntax error"),
        ("BZMPOP 1 1 z", "wrong number of arguments for 'bzmpop' command"),
    ] {
        talk(&mut client, &format!("{line}\r\n"), &format!("-ERR {told}\r\n")).await;
    }
    assert_eq!(rig.watches_begun(), 0);
}

#[tokio::test]
async fn clients_blocked_for_several_elements_get_them_and_ignore_other_types() {
    let rig = open().await;
    let mut first = rig.blocked("BLMPOP 0 2 q r RIGHT COUNT 9").await;
    let mut set = rig.blocked("BZMPOP 0 1 z MIN").await;
    let mut other = rig.client().await;
    talk(&mut other, "SET q 1\r\nRPUSH r a b\r\n", "+OK\r\n:2\r\n").await;
    let told = "*2\r\n$1\r\nr\r\n*2\r\n$1\r\nb\r\n$1\r\na\r\n";
    talk(&mut first, "", told).await;
    talk(&mut other, "ZADD z 1 m\r\n", ":1\r\n").await;
    talk(&mut set, "", "*2\r\n$1\r\nz\r\n*1\r\n*2\r\n$1\r\nm\r\n$1\r\n1\r\n").await;
    talk(&mut other, "BLMPOP 0.01 1 none LEFT\r\n", "*-1\r\n").await;
    rig.no_watch().await;
}

#[tokio::test]
async fn who_waits_for_another_type_does_not_stand_in_the_way() {
    let rig = open().await;
    let mut set = rig.blocked("BZPOPMIN q 0").await;
    let mut moving = rig.blocked_in_line("BLMOVE q r LEFT LEFT 0").await;
    let mut list = rig.blocked_in_line("BLPOP q 0").await;
    let mut other = rig.client().await;
    talk(&mut other, "SET r 1\r\nRPUSH q a\r\n", "+OK\r\n:1\r\n").await;
    talk(&mut moving, "", WRONG).await;
    talk(&mut list, "", "*2\r\n$1\r\nq\r\n$1\r\na\r\n").await;
    talk(&mut other, "ZADD q 1 m\r\n", ":1\r\n").await;
    talk(&mut set, "", "*3\r\n$1\r\nq\r\n$1\r\nm\r\n$1\r\n1\r\n").await;
    rig.no_watch().await;
}

#[tokio::test]
async fn a_client_that_leaves_lets_the_next_one_try() {
    let rig = open().await;
    let first = rig.blocked("BLPOP q 0").await;
    let mut second = rig.blocked_in_line("BRPOPLPUSH q r 0").await;
    let mut third = rig.blocked("BLPOP r 0").await;
    drop(first);
    let mut other = rig.client().await;
    talk(&mut other, "RPUSH q a\r\n", ":1\r\n").await;
    talk(&mut second, "", "$1\r\na\r\n").await;
    talk(&mut third, "", "*2\r\n$1\r\nr\r\n$1\r\na\r\n").await;
}

/// The node reads what follows the command. Otherwise it would not notice that the client has left.
#[tokio::test]
async fn a_client_that_leaves_with_many_requests_unanswered_is_noticed() {
    let rig = open().await;
    let requests = "PING\r\n".repeat(300_000);
    let first = rig.blocked(&format!("BLPOP q 0\r\n{requests}")).await;
    drop(first);
    rig.no_watch().await;
    let limits = Limits { request_bytes_max: 1_100_000, ..Limits::default() };
    let rig = super::rig(Access::open(), limits).await;
    let mut client = rig.blocked(&format!("BLPOP q 0\r\n{requests}")).await;
    let told = "-ERR more than 1100000 bytes of requests follow a blocking command, which is \
                limits.request_bytes_max\r\n";
    talk(&mut client, "", told).await;
    rig.no_watch().await;
}

#[tokio::test]
async fn a_client_stays_blocked_while_a_key_has_another_type() {
    let rig = open().await;
    let mut list = rig.blocked("BLPOP q r 0").await;
    let mut set = rig.blocked_in_line("BZPOPMIN q 0").await;
    let mut other = rig.client().await;
    let lines = "SET q 1\r\nRPUSH r a\r\n";
    talk(&mut other, lines, "+OK\r\n:1\r\n").await;
    talk(&mut list, "", "*2\r\n$1\r\nr\r\n$1\r\na\r\n").await;
    talk(&mut other, "DEL q\r\nRPUSH q b\r\n", ":1\r\n:1\r\n").await;
    talk(&mut other, "DEL q\r\nZADD q 1 m\r\n", ":1\r\n:1\r\n").await;
    talk(&mut set, "", "*3\r\n$1\r\nq\r\n$1\r\nm\r\n$1\r\n1\r\n").await;
}

#[tokio::test]
async fn a_watch_that_ends_begins_again_and_nothing_is_missed() {
    let rig = open().await;
    talk(&mut rig.client().await, "RPUSH full a\r\n", ":1\r\n").await;
    let mut client = rig.blocked("BLPOP q 0").await;
    rig.hold_watches();
    rig.fail_watches(&ScanFailed::Late);
    let again = async {
        while rig.watches_begun() < 2 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), again).await.expect("it begins again");
    // The watch has not begun, so it does not show this.
    rig.copy("redis/0/full", "redis/0/q");
    rig.begin_watches();
    talk(&mut client, "", "*2\r\n$1\r\nq\r\n$1\r\na\r\n").await;
}

#[tokio::test]
async fn a_client_that_cannot_be_blocked_gets_the_reason() {
    let limited = super::rig(reader_and_writer(), Limits::default()).await;
    let mut reader = limited.client().await;
    let denied = "-NOPERM this user has no permissions to run the 'blpop' command\r\n";
    talk(&mut reader, &format!("AUTH {READER}\r\nBLPOP q 0\r\n"), &format!("+OK\r\n{denied}"))
        .await;
    let rig = open().await;
    let mut client = rig.client().await;
    rig.memory.0.lock().unwrap().failed_watches =
        [ScanFailed::Unsupported, ScanFailed::TooManyWatches].into();
    let told = "-ERR command 'blpop' is not available with this cluster's protocol\r\n";
    talk(&mut client, "BLPOP q 0\r\n", told).await;
    let told = ask(&mut client, "BLPOP q 0").await;
    assert!(told.starts_with("-ERR the watch did not begin: 256 watches run"), "{told}");
}
