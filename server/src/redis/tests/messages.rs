//! Messages: `PUBLISH`, `SUBSCRIBE` and their relatives.

use std::fmt::Write as _;

use super::*;

fn bulk(text: &str) -> String {
    format!("${}\r\n{text}\r\n", text.len())
}

/// A list of strings and, at the end, of numbers, as RESP2 has it.
fn list(items: &[&str]) -> String {
    let mut all = format!("*{}\r\n", items.len());
    for item in items {
        match item.strip_prefix(':') {
            Some(_) => write!(all, "{item}\r\n").unwrap(),
            None => all += &bulk(item),
        }
    }
    all
}

/// The same as a push of RESP3.
fn push(items: &[&str]) -> String {
    list(items).replacen('*', ">", 1)
}

/// Receives exactly this.
async fn hears(client: &mut TcpStream, what: &str) {
    talk(client, "", what).await;
}

async fn hello_3(client: &mut TcpStream) {
    let answer = ask(client, "HELLO 3").await;
    assert!(answer.starts_with("%7\r\n"), "{answer}");
}

/// Waits for the end of a connection, and drops what arrives before it.
async fn is_disconnected(client: &mut TcpStream) {
    let ended = async {
        let mut dropped = vec![0; 64 << 10];
        while client.read(&mut dropped).await.is_ok_and(|read| read > 0) {}
    };
    tokio::time::timeout(Duration::from_secs(30), ended).await.expect("the connection ends");
}

#[tokio::test]
async fn a_subscriber_receives_what_is_published_after_its_confirmation() {
    let rig = open().await;
    let (mut one, mut two, mut other) =
        (rig.client().await, rig.client().await, rig.client().await);
    talk(&mut other, "PUBLISH a early\r\n", ":0\r\n").await;
    talk(&mut one, "SUBSCRIBE a b a\r\n", &{
        list(&["subscribe", "a", ":1"])
            + &list(&["subscribe", "b", ":2"])
            + &list(&["subscribe", "a", ":2"])
    })
    .await;
    talk(&mut two, "PSUBSCRIBE a* [\r\n", &{
        list(&["psubscribe", "a*", ":1"]) + &list(&["psubscribe", "[", ":2"])
    })
    .await;
    talk(&mut two, "SUBSCRIBE ab\r\n", &list(&["subscribe", "ab", ":3"])).await;
    talk(&mut other, "PUBLISH a 1\r\nPUBLISH ab 2\r\nPUBLISH c 3\r\n", ":2\r\n:2\r\n:0\r\n").await;
    talk(&mut other, "PUBLISH b 4\r\n", ":1\r\n").await;
    hears(&mut one, &(list(&["message", "a", "1"]) + &list(&["message", "b", "4"]))).await;
    hears(&mut two, &{
        list(&["pmessage", "a*", "a", "1"])
            + &list(&["message", "ab", "2"])
            + &list(&["pmessage", "a*", "ab", "2"])
    })
    .await;
    assert_eq!(rig.watches_begun(), 1, "one watch for all");
}

#[tokio::test]
async fn messages_keep_the_order_in_which_a_pipeline_published_them() {
    let rig = open().await;
    let (mut client, mut other) = (rig.client().await, rig.client().await);
    talk(&mut client, "PSUBSCRIBE *\r\n", &list(&["psubscribe", "*", ":1"])).await;
    let (mut lines, mut wanted) = (String::new(), String::new());
    for number in 0..100 {
        let channel = ["z", "a", "{m}1"][number % 3];
        let text = number.to_string();
        write!(lines, "PUBLISH {channel} {text}\r\n").unwrap();
        wanted += &list(&["pmessage", "*", channel, &text]);
    }
    rig.begun();
    talk(&mut other, &lines, &":1\r\n".repeat(100)).await;
    assert_eq!(rig.begun().len(), 1, "one transaction");
    hears(&mut client, &wanted).await;
    // The next transaction replaces what this one left.
    talk(&mut other, "PUBLISH a last\r\n", ":1\r\n").await;
    hears(&mut client, &list(&["pmessage", "*", "a", "last"])).await;
    assert_eq!(rig.keys(), ["redis/m/a", "redis/m/z", "redis/m/{m}1"]);
}

#[tokio::test]
async fn messages_of_a_transaction_are_delivered_only_if_it_commits() {
    let rig = open().await;
    let (mut client, mut other) = (rig.client().await, rig.client().await);
    talk(&mut client, "SUBSCRIBE a b\r\n", &{
        list(&["subscribe", "a", ":1"]) + &list(&["subscribe", "b", ":2"])
    })
    .await;
    let queued = "+OK\r\n+QUEUED\r\n+QUEUED\r\n+QUEUED\r\n+QUEUED\r\n";
    let lines = "MULTI\r\nPUBLISH b 1\r\nINCR n\r\nPUBLISH a 2\r\nPUBLISH b 3\r\n";
    talk(&mut other, lines, queued).await;
    talk(&mut other, "DISCARD\r\n", "+OK\r\n").await;
    talk(&mut other, &format!("WATCH n\r\n{lines}"), &format!("+OK\r\n{queued}")).await;
    talk(&mut rig.client().await, "SET n 5\r\n", "+OK\r\n").await;
    talk(&mut other, "EXEC\r\n", "*-1\r\n").await;
    talk(&mut other, lines, queued).await;
    rig.twist([Twist::Abort(AbortReason::Conflict), Twist::LostAbort, Twist::LostCommit]);
    let lost = ask(&mut other, "EXEC").await;
    assert!(lost.starts_with("-COMMITTED"), "{lost}");
    let heard = |numbers: [&str; 3]| {
        list(&["message", "b", numbers[0]])
            + &list(&["message", "a", numbers[1]])
            + &list(&["message", "b", numbers[2]])
    };
    hears(&mut client, &heard(["1", "2", "3"])).await;
    talk(&mut other, lines, queued).await;
    talk(&mut other, "EXEC\r\n", "*4\r\n:1\r\n:7\r\n:1\r\n:1\r\n").await;
    hears(&mut client, &heard(["1", "2", "3"])).await;
    // Nothing else has arrived in between.
    talk(&mut client, "PING\r\n", &list(&["pong", ""])).await;
}

#[tokio::test]
async fn a_client_of_resp2_with_subscriptions_may_give_few_commands() {
    let rig = open().await;
    let mut client = rig.client().await;
    talk(&mut client, "SUBSCRIBE a\r\n", &list(&["subscribe", "a", ":1"])).await;
    for (line, name) in [
        ("GET a", "get"),
        ("PUBLISH a b", "publish"),
        ("MULTI", "multi"),
        ("HELLO 3", "hello"),
        ("KEYS *", "keys"),
        ("PUBSUB NUMPAT", "pubsub"),
    ] {
        let refused = format!(
            "-ERR Can't execute '{name}': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / \
             RESET are allowed in this context\r\n"
        );
        talk(&mut client, &format!("{line}\r\n"), &refused).await;
    }
    talk(&mut client, "PING\r\nPING x\r\n", &(list(&["pong", ""]) + &list(&["pong", "x"]))).await;
    let unknown = "-ERR unknown command 'nonsense', with args beginning with: \r\n";
    talk(&mut client, "nonsense\r\n", unknown).await;
    let arity = "-ERR wrong number of arguments for 'subscribe' command\r\n";
    talk(&mut client, "SUBSCRIBE\r\n", arity).await;
    // Commands before and after in one pipeline.
    let lines = "UNSUBSCRIBE a\r\nSET k 1\r\nSUBSCRIBE b\r\nUNSUBSCRIBE\r\nGET k\r\n";
    let answers = list(&["unsubscribe", "a", ":0"])
        + "+OK\r\n"
        + &list(&["subscribe", "b", ":1"])
        + &list(&["unsubscribe", "b", ":0"])
        + &bulk("1");
    talk(&mut client, lines, &answers).await;
    // RESET ends all subscriptions without a word.
    talk(&mut client, "SUBSCRIBE a\r\n", &list(&["subscribe", "a", ":1"])).await;
    talk(&mut client, "RESET\r\nGET k\r\nPING\r\n", "+RESET\r\n$1\r\n1\r\n+PONG\r\n").await;
    talk(&mut client, "PUBLISH a x\r\nPUBSUB CHANNELS\r\n", ":0\r\n*0\r\n").await;
    talk(&mut client, "SUBSCRIBE a\r\nQUIT\r\n", &(list(&["subscribe", "a", ":1"]) + "+OK\r\n"))
        .await;
    is_disconnected(&mut client).await;
    rig.no_watch().await;
}

#[tokio::test]
async fn a_client_of_resp3_receives_pushes_between_its_answers() {
    let rig = open().await;
    let mut client = rig.client().await;
    hello_3(&mut client).await;
    talk(&mut client, "SUBSCRIBE a\r\nPSUBSCRIBE ?\r\nSSUBSCRIBE a\r\n", &{
        push(&["subscribe", "a", ":1"])
            + &push(&["psubscribe", "?", ":2"])
            + &push(&["ssubscribe", "a", ":1"])
    })
    .await;
    talk(&mut client, "SET k 1\r\nGET k\r\nPING\r\n", "+OK\r\n$1\r\n1\r\n+PONG\r\n").await;
    talk(&mut client, "PUBLISH a x\r\n", ":2\r\n").await;
    hears(&mut client, &(push(&["message", "a", "x"]) + &push(&["pmessage", "?", "a", "x"]))).await;
    talk(&mut client, "SPUBLISH a y\r\n", ":1\r\n").await;
    hears(&mut client, &push(&["smessage", "a", "y"])).await;
    let answers = "+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n:2\r\n$1\r\n1\r\n";
    talk(&mut client, "MULTI\r\nPUBLISH a z\r\nGET k\r\nEXEC\r\n", answers).await;
    hears(&mut client, &(push(&["message", "a", "z"]) + &push(&["pmessage", "?", "a", "z"]))).await;
    talk(&mut client, "UNSUBSCRIBE\r\nPUNSUBSCRIBE\r\nSUNSUBSCRIBE\r\nUNSUBSCRIBE\r\n", &{
        push(&["unsubscribe", "a", ":1"])
            + &push(&["punsubscribe", "?", ":0"])
            + &push(&["sunsubscribe", "a", ":0"])
            + ">3\r\n$11\r\nunsubscribe\r\n_\r\n:0\r\n"
    })
    .await;
    rig.no_watch().await;
}

#[tokio::test]
async fn unsubscribing_answers_each_name_and_all_without_one() {
    let rig = open().await;
    let (mut client, mut other) = (rig.client().await, rig.client().await);
    // Without any subscription.
    talk(&mut client, "UNSUBSCRIBE\r\nPUNSUBSCRIBE x y\r\n", &{
        "*3\r\n$11\r\nunsubscribe\r\n$-1\r\n:0\r\n".to_owned()
            + &list(&["punsubscribe", "x", ":0"])
            + &list(&["punsubscribe", "y", ":0"])
    })
    .await;
    talk(&mut client, "PSUBSCRIBE p*\r\nSUBSCRIBE a b c\r\n", &{
        list(&["psubscribe", "p*", ":1"])
            + &list(&["subscribe", "a", ":2"])
            + &list(&["subscribe", "b", ":3"])
            + &list(&["subscribe", "c", ":4"])
    })
    .await;
    talk(&mut client, "UNSUBSCRIBE b none\r\n", &{
        list(&["unsubscribe", "b", ":3"]) + &list(&["unsubscribe", "none", ":3"])
    })
    .await;
    talk(&mut other, "PUBLISH b 1\r\nPUBLISH a 2\r\n", ":0\r\n:1\r\n").await;
    hears(&mut client, &list(&["message", "a", "2"])).await;
    talk(&mut client, "UNSUBSCRIBE\r\n", &{
        list(&["unsubscribe", "a", ":2"]) + &list(&["unsubscribe", "c", ":1"])
    })
    .await;
    // Still with a pattern.
    talk(&mut client, "PING\r\n", &list(&["pong", ""])).await;
    talk(&mut client, "PUNSUBSCRIBE\r\nPING\r\n", &{
        list(&["punsubscribe", "p*", ":0"]) + "+PONG\r\n"
    })
    .await;
    rig.no_watch().await;
    // The next subscription begins another watch.
    talk(&mut client, "SUBSCRIBE a\r\n", &list(&["subscribe", "a", ":1"])).await;
    talk(&mut other, "PUBLISH a 3\r\n", ":1\r\n").await;
    hears(&mut client, &list(&["message", "a", "3"])).await;
    assert_eq!(rig.watches_begun(), 2);
}

#[tokio::test]
async fn a_subscription_is_confirmed_when_the_watch_has_begun() {
    let limits = Limits { request_timeout: Duration::from_secs(2), ..Limits::default() };
    let rig = rig(Access::open(), limits).await;
    rig.hold_watches();
    let (mut one, mut two) = (rig.client().await, rig.client().await);
    one.write_all(b"SUBSCRIBE a\r\n").await.unwrap();
    let none = tokio::time::timeout(Duration::from_millis(100), one.read_u8()).await;
    assert!(none.is_err(), "not confirmed");
    two.write_all(b"SUBSCRIBE b\r\n").await.unwrap();
    let none = tokio::time::timeout(Duration::from_millis(100), two.read_u8()).await;
    assert!(none.is_err(), "not confirmed");
    rig.begin_watches();
    hears(&mut one, &list(&["subscribe", "a", ":1"])).await;
    hears(&mut two, &list(&["subscribe", "b", ":1"])).await;
    assert_eq!(rig.watches_begun(), 1);
    drop((one, two));
    rig.no_watch().await;
    // It never begins.
    rig.hold_watches();
    let mut late = rig.client().await;
    let text = "-ERR the watch of messages did not begin within limits.request_timeout_ms; try \
                again\r\n";
    talk(&mut late, "SUBSCRIBE a\r\nPING\r\n", &format!("{text}+PONG\r\n")).await;
    rig.no_watch().await;
}

#[tokio::test]
async fn without_a_watch_a_subscription_is_refused() {
    let rig = open().await;
    let mut client = rig.client().await;
    let failures = [ScanFailed::Unsupported, ScanFailed::TooManyWatches];
    rig.memory.0.lock().unwrap().failed_watches.extend(failures);
    let text = "-ERR command 'subscribe' is not available with this cluster's protocol\r\n";
    talk(&mut client, "SUBSCRIBE a\r\n", text).await;
    let text = "-ERR the watch did not begin: 256 watches run at this gateway, which \
                is the limit; try another one\r\n";
    talk(&mut client, "PSUBSCRIBE a\r\nPING\r\n", &format!("{text}+PONG\r\n")).await;
    // The first result of the watch is an error.
    rig.hold_watches();
    client.write_all(b"SUBSCRIBE a\r\n").await.unwrap();
    while rig.watches_begun() == 0 {
        tokio::task::yield_now().await;
    }
    rig.fail_watches(&ScanFailed::Late);
    let failed = ask(&mut client, "").await;
    assert!(failed.starts_with("-ERR the watch of messages did not begin, try again"), "{failed}");
    talk(&mut client, "PUBSUB CHANNELS\r\n", "*0\r\n").await;
}

#[tokio::test]
async fn subscribers_are_disconnected_when_the_watch_fails() {
    let rig = open().await;
    let (mut one, mut two) = (rig.client().await, rig.client().await);
    let mut other = rig.client().await;
    hello_3(&mut two).await;
    talk(&mut one, "SUBSCRIBE a\r\n", &list(&["subscribe", "a", ":1"])).await;
    talk(&mut two, "PSUBSCRIBE *\r\n", &push(&["psubscribe", "*", ":1"])).await;
    rig.fail_watches(&ScanFailed::Late);
    is_disconnected(&mut one).await;
    is_disconnected(&mut two).await;
    talk(&mut other, "PUBLISH a missed\r\n", ":0\r\n").await;
    let mut again = rig.client().await;
    talk(&mut again, "SUBSCRIBE a\r\n", &list(&["subscribe", "a", ":1"])).await;
    talk(&mut other, "PUBLISH a heard\r\n", ":1\r\n").await;
    hears(&mut again, &list(&["message", "a", "heard"])).await;
    assert_eq!(rig.watches_begun(), 2);
}

#[tokio::test]
async fn a_subscriber_that_does_not_read_is_disconnected() {
    let rig = open().await;
    let (mut slow, mut quick, mut other) =
        (rig.client().await, rig.client().await, rig.client().await);
    talk(&mut slow, "SUBSCRIBE a\r\n", &list(&["subscribe", "a", ":1"])).await;
    talk(&mut quick, "SUBSCRIBE a\r\n", &list(&["subscribe", "a", ":1"])).await;
    let text = "x".repeat(1 << 19);
    let publish = requests(&[&["PUBLISH", "a", &text]]);
    let wanted = list(&["message", "a", &text]);
    let mut published = 0;
    // The operating system takes some megabytes for it.
    loop {
        let receivers = {
            other.write_all(publish.as_bytes()).await.unwrap();
            let mut answer = [0; 4];
            other.read_exact(&mut answer).await.unwrap();
            answer
        };
        hears(&mut quick, &wanted).await;
        published += 1;
        match &receivers {
            b":2\r\n" => assert!(published < 400, "the slow client keeps its connection"),
            receivers => {
                assert_eq!(receivers, b":1\r\n");
                break;
            }
        }
    }
    is_disconnected(&mut slow).await;
    talk(&mut quick, "PING\r\n", &list(&["pong", ""])).await;
}

#[tokio::test]
async fn channels_for_spublish_are_others() {
    let rig = open().await;
    let (mut client, mut other) = (rig.client().await, rig.client().await);
    talk(&mut client, "SSUBSCRIBE a\r\nPSUBSCRIBE *\r\nSSUBSCRIBE b\r\n", &{
        list(&["ssubscribe", "a", ":1"])
            + &list(&["psubscribe", "*", ":1"])
            + &list(&["ssubscribe", "b", ":2"])
    })
    .await;
    talk(&mut other, "PUBLISH a 1\r\nSPUBLISH a 2\r\nPUBLISH b 3\r\n", ":1\r\n:1\r\n:1\r\n").await;
    hears(&mut client, &{
        list(&["pmessage", "*", "a", "1"])
            + &list(&["smessage", "a", "2"])
            + &list(&["pmessage", "*", "b", "3"])
    })
    .await;
    talk(&mut client, "SUNSUBSCRIBE a\r\nSUNSUBSCRIBE\r\n", &{
        list(&["sunsubscribe", "a", ":1"]) + &list(&["sunsubscribe", "b", ":0"])
    })
    .await;
    talk(&mut other, "SPUBLISH a 4\r\nPUBSUB SHARDCHANNELS\r\n", ":0\r\n*0\r\n").await;
}

#[tokio::test]
async fn what_clients_of_a_node_have_subscribed_to_is_shown() {
    let rig = open().await;
    let (mut one, mut two, mut other) =
        (rig.client().await, rig.client().await, rig.client().await);
    hello_3(&mut one).await;
    ask(&mut one, "SUBSCRIBE a ab\r\nPSUBSCRIBE x* y*\r\nSSUBSCRIBE s").await;
    talk(&mut two, "SUBSCRIBE a\r\nPSUBSCRIBE x*\r\n", &{
        list(&["subscribe", "a", ":1"]) + &list(&["psubscribe", "x*", ":2"])
    })
    .await;
    for (line, answer) in [
        ("PUBSUB CHANNELS", list(&["a", "ab"])),
        ("PUBSUB channels ?b", list(&["ab"])),
        ("PUBSUB NUMSUB", "*0\r\n".to_owned()),
        (
            "PUBSUB NUMSUB a ab none",
            "*6\r\n$1\r\na\r\n:2\r\n$2\r\nab\r\n:1\r\n$4\r\nnone\r\n:0\r\n".into(),
        ),
        ("PUBSUB NUMPAT", ":2\r\n".to_owned()),
        ("PUBSUB SHARDCHANNELS", list(&["s"])),
        ("PUBSUB SHARDNUMSUB s a", "*4\r\n$1\r\ns\r\n:1\r\n$1\r\na\r\n:0\r\n".into()),
        ("PUBSUB", "-ERR wrong number of arguments for 'pubsub' command\r\n".into()),
        (
            "PUBSUB NUMPAT x",
            "-ERR wrong number of arguments for 'pubsub|numpat' command\r\n".into(),
        ),
    ] {
        talk(&mut other, &format!("{line}\r\n"), &answer).await;
    }
    let odd = ask(&mut other, "PUBSUB nonsense").await;
    assert!(odd.starts_with("-ERR unknown subcommand 'nonsense'"), "{odd}");
    let info = ask(&mut other, "INFO").await;
    let wanted = "pubsub_channels:2\r\npubsub_patterns:2\r\npubsubshard_channels:1\r\n";
    assert!(info.contains(wanted), "{info}");
    let own = ask(&mut one, "CLIENT INFO").await;
    assert!(own.contains(" sub=2 psub=2 ssub=1 "), "{own}");
    let described = ask(&mut other, "COMMAND INFO subscribe unsubscribe publish pubsub").await;
    for line in [
        "$9\r\nsubscribe\r\n:-2\r\n",
        "$11\r\nunsubscribe\r\n:-1\r\n",
        "$7\r\npublish\r\n:3\r\n*4\r\n+pubsub\r\n",
        "$6\r\npubsub\r\n:-2\r\n",
    ] {
        assert!(described.contains(line), "{described}");
    }
    drop(one);
    let gone = async { while ask(&mut other, "PUBSUB CHANNELS ab").await != "*0\r\n" {} };
    tokio::time::timeout(Duration::from_secs(30), gone).await.expect("the client is gone");
    talk(&mut other, "PUBSUB NUMPAT\r\n", ":1\r\n").await;
}

#[tokio::test]
async fn commands_on_keys_do_not_see_channels() {
    let rig = open().await;
    let mut client = rig.client().await;
    talk(&mut client, "SPUBLISH s 1\r\nPUBLISH a 1\r\nPUBLISH b 2\r\n", &":0\r\n".repeat(3)).await;
    let nothing = "*2\r\n$1\r\n0\r\n*0\r\n";
    for (line, answer) in [
        ("KEYS *", "*0\r\n"),
        ("SCAN 0", nothing),
        ("DBSIZE", ":0\r\n"),
        ("RANDOMKEY", "$-1\r\n"),
        ("EXISTS a m/a redis/m/a", ":0\r\n"),
        ("FLUSHDB", "+OK\r\n"),
        ("SET kept 1", "+OK\r\n"),
        ("SELECT 15", "+OK\r\n"),
        ("SET kept 1", "+OK\r\n"),
        ("FLUSHALL", "+OK\r\n"),
        ("SELECT 16", "-ERR DB index is out of range\r\n"),
        ("SELECT 128", "-ERR DB index is out of range\r\n"),
    ] {
        talk(&mut client, &format!("{line}\r\n"), answer).await;
    }
    assert_eq!(rig.keys(), ["redis/m/a", "redis/m/b", "redis/n/s"]);
}

#[tokio::test]
async fn who_may_only_read_subscribes_and_publishes_nothing() {
    let rig = rig(reader_and_writer(), Limits::default()).await;
    let (mut client, mut other) = (rig.client().await, rig.client().await);
    for line in ["SUBSCRIBE a", "UNSUBSCRIBE", "PUBLISH a b", "PUBSUB NUMPAT"] {
        let text = "-NOAUTH Authentication required.\r\n";
        talk(&mut client, &format!("{line}\r\n"), text).await;
    }
    let denied = "-NOPERM this user has no permissions to run the 'publish' command\r\n";
    let answers = format!("+OK\r\n{denied}{}", list(&["subscribe", "a", ":1"]));
    talk(&mut client, &format!("AUTH {READER}\r\nPUBLISH a b\r\nSUBSCRIBE a\r\n"), &answers).await;
    talk(&mut other, &format!("AUTH {WRITER}\r\nPUBLISH a b\r\n"), "+OK\r\n:1\r\n").await;
    hears(&mut client, &list(&["message", "a", "b"])).await;
    // RESET forgets who it is, and its subscriptions.
    talk(&mut client, "RESET\r\n", "+RESET\r\n").await;
    talk(&mut other, "PUBLISH a b\r\n", ":0\r\n").await;
}

#[tokio::test]
async fn subscriptions_in_transactions_and_messages_in_scripts_are_refused() {
    let rig = open().await;
    let mut client = rig.client().await;
    let abort = "-EXECABORT Transaction discarded because of previous errors.\r\n";
    for name in ["SUBSCRIBE", "PSUBSCRIBE", "SSUBSCRIBE", "UNSUBSCRIBE"] {
        let refused = format!("-ERR {name} is not allowed in transactions\r\n");
        let answers = format!("+OK\r\n{refused}{abort}");
        talk(&mut client, &format!("MULTI\r\n{name} a\r\nEXEC\r\n"), &answers).await;
    }
    for (name, why) in [
        ("PUBLISH", "ERR PUBLISH and SPUBLISH are not available in scripts"),
        ("SPUBLISH", "ERR PUBLISH and SPUBLISH are not available in scripts"),
        ("PSUBSCRIBE", "ERR This Redis command is not allowed from script"),
    ] {
        let script = format!("redis.call('SET', KEYS[1], 1) redis.call('{name}', 'a', 'b')");
        client.write_all(requests(&[&["EVAL", &script, "1", "k"]]).as_bytes()).await.unwrap();
        let answer = ask(&mut client, "GET k").await;
        assert!(answer.starts_with(&format!("-{why}")), "{answer}");
        assert!(answer.ends_with("\r\n$-1\r\n"), "the script changed nothing: {answer}");
    }
}

#[tokio::test]
async fn messages_and_channels_are_bounded() {
    let limits = Limits {
        response_bytes_max: 1_100_000,
        key_bytes_max: 20,
        value_bytes_max: 1 << 20,
        request_bytes_max: 4 << 20,
        request_bytes_in_flight_max: 16 << 20,
        ..Limits::default()
    };
    let rig = rig(Access::open(), limits).await;
    let (mut client, mut other) = (rig.client().await, rig.client().await);
    let text = "-ERR a channel of 13 bytes; at most 12 are allowed\r\n";
    talk(&mut other, "PUBLISH abcdefghijklm x\r\n", text).await;
    let large = "x".repeat(1_047_552 - 20);
    let too_large = format!("{large}x");
    hello_3(&mut client).await;
    talk(&mut client, "SUBSCRIBE a\r\n", &push(&["subscribe", "a", ":1"])).await;
    let why = "-ERR the messages of one transaction on one channel have at most 1047552 bytes, \
               counting 20 more for each; this one was not published; publish it in a transaction \
               of its own, or publish less\r\n";
    talk(&mut other, &requests(&[&["PUBLISH", "a", &too_large]]), why).await;
    talk(&mut other, &requests(&[&["PUBLISH", "a", &large]]), ":1\r\n").await;
    hears(&mut client, &push(&["message", "a", &large])).await;
    // In one transaction, one of both has room. The other one has no effect.
    let publish: &[&str] = &["PUBLISH", "a", &large];
    let lines = requests(&[&["MULTI"], publish, &["PUBLISH", "a", "x"], &["EXEC"]]);
    let answers = format!("+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n:1\r\n{why}");
    talk(&mut other, &lines, &answers).await;
    hears(&mut client, &push(&["message", "a", &large])).await;
    let line = format!("PSUBSCRIBE ok {}\r\n", "x".repeat(1_025));
    talk(&mut client, &line, "-ERR a pattern has at most 1024 bytes\r\n").await;
    talk(&mut client, "PUBSUB NUMPAT\r\n", ":0\r\n").await;
    let many = "PSUBSCRIBE".to_owned() + &" x".repeat(1_025) + "\r\n";
    let why = "-ERR a client has at most 65536 subscriptions, 1024 of them with patterns; use \
               another connection\r\n";
    talk(&mut client, &many, why).await;
    talk(&mut client, "PUBSUB NUMPAT\r\n", ":0\r\n").await;
    let many = "PUBSUB NUMSUB".to_owned() + &" x".repeat(31 << 10) + "\r\n";
    let why = "-ERR the answer is larger than limits.response_bytes_max; give a pattern, or fewer \
               channels\r\n";
    talk(&mut client, &many, why).await;
    // Who may publish is not harmed: its message arrives.
    talk(&mut other, "PUBLISH a last\r\n", ":1\r\n").await;
    hears(&mut client, &push(&["message", "a", "last"])).await;
}

#[tokio::test]
async fn values_that_publish_did_not_write_are_no_messages() {
    let rig = open().await;
    let (mut client, mut other) = (rig.client().await, rig.client().await);
    talk(&mut client, "SUBSCRIBE a\r\n", &list(&["subscribe", "a", ":1"])).await;
    {
        let state = &mut *rig.memory.0.lock().unwrap();
        state.clock += 1;
        let key = |text: &str| Key::from(text);
        let writes: Writes = [
            (key("redis/m/a"), Some("by another client".into())),
            (key("redis/m"), Some("no channel".into())),
            (key("redis/n/a"), None),
        ]
        .into_iter()
        .collect();
        state.tell_watches(TxnId::new(ClientId(9), 1), &writes);
    }
    talk(&mut other, "PUBLISH a 1\r\n", ":1\r\n").await;
    hears(&mut client, &list(&["message", "a", "1"])).await;
}
