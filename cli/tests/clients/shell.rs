//! The shell in a pipe, against the real client service in front of a small serial store.

use std::io::Write as _;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use crate::gateways::{Call, Node, Store, Twist};
use orthodrome_server::service::{Access, Credential, Limits, Principal, Role};

/// Runs the shell on a gateway with `script` as its standard input.
async fn shell(node: &Node, arguments: &[&str], script: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_orthodrome"));
    command.args(["shell", "--connect", &node.address]).args(arguments);
    for name in ["ORTHODROME_CONNECT", "ORTHODROME_TOKEN_FILE", "ORTHODROME_TLS_CA"] {
        command.env_remove(name);
    }
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let script = script.to_owned();
    tokio::task::spawn_blocking(move || {
        let mut child = command.spawn().unwrap();
        // A shell that did not start has closed its end.
        let _ = child.stdin.take().unwrap().write_all(script.as_bytes());
        child.wait_with_output().unwrap()
    })
    .await
    .unwrap()
}

/// Runs the shell with these arguments and no script.
async fn shell_of(arguments: Vec<&str>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_orthodrome"));
    command.arg("shell").args(arguments).stdin(Stdio::null());
    for name in ["ORTHODROME_CONNECT", "ORTHODROME_TOKEN_FILE", "ORTHODROME_TLS_CA"] {
        command.env_remove(name);
    }
    tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_script_prints_the_result_of_each_command() {
    let node = Node::start(&Arc::<Store>::default(), 0).await;
    let script = r#"
        # A shop.
        get tea
        put tea 12 "earl grey" "a\tb"
        get tea 'earl grey'
        add tea -2
        append tea !
        get-stale tea
        cas seat nothing ada
        cas seat ada bob
        get seat
        delete seat tea
        get seat tea
        priority high

        # Two rounds: what was written is seen before it is committed.
        put left 3
        begin left right -> left right
        add left -1
        put right new
        get left right
        commit
        get left right
        begin left
        abort
    "#;
    let output = shell(&node, &[], script).await;
    assert_eq!(text(&output.stderr), "");
    let expected = r#"tea: nothing
committed
tea = 12
"earl grey" = "a\tb"
committed
committed
tea = 10!
committed
committed
seat = bob
committed
seat: nothing
tea: nothing
priority high
committed
left = 3
right: nothing
left = 2
right = new
committed
left = 2
right = new
left = 2
aborted
"#;
    assert_eq!(text(&output.stdout), expected);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(node.store.open(), 0, "no transaction is left open");
}

/// As `shell | head -1` does.
#[tokio::test(flavor = "multi_thread")]
async fn closed_standard_output_ends_the_shell_quietly() {
    let node = Node::start(&Arc::<Store>::default(), 0).await;
    let mut command = Command::new(env!("CARGO_BIN_EXE_orthodrome"));
    command.args(["shell", "--connect", &node.address, "-e", "begin a -> a", "-e", "put a 1"]);
    command.args(["-e", "get a"]).env_remove("ORTHODROME_TOKEN_FILE");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    command.stdin(Stdio::null()).stdout(writer).stderr(Stdio::piped());
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(!text(&output.stderr).contains("panicked"), "{}", text(&output.stderr));
    assert_eq!(node.store.open(), 0, "no transaction is left open");
}

/// With a protocol that runs general transactions, and with one that does not.
#[tokio::test(flavor = "multi_thread")]
async fn begin_without_keys_opens_a_general_transaction() {
    let store = Arc::<Store>::default;
    for node in [Node::start(&store(), 0).await, Node::start_plain(&store(), 0).await] {
        let script = r#"
            put a b b 5
            begin
            get a
            get b
            add b 1
            cas a x y
            put c new
            get b c a
            commit
            get b c
            begin
            append d x
            commit
            get d
            begin
            put e 1
            abort
            begin
            get e
        "#;
        let output = shell(&node, &[], script).await;
        assert_eq!(
            text(&output.stderr),
            "error: line 7: refused: the current value of the key does not allow the operation; the \
             transaction is still open\n"
        );
        let expected = "committed\nopen\na = b\nb = 5\nb = 6\nc = new\na = b\ncommitted\nb = 6\n\
                        c = new\nopen\ncommitted\nd = x\nopen\naborted\nopen\ne: nothing\n";
        assert_eq!(text(&output.stdout), expected);
        assert_eq!(node.store.open(), 0, "no transaction is left open");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_command_is_reported_with_its_line_and_the_rest_runs() {
    let node = Node::start(&Arc::<Store>::default(), 0).await;
    let script = "put a 1\ncas a 2 3\njump\ncommit\nbegin a -> a\nput b 1\nadd a x\nput a 9\n\
                  cas a 8 7\nget c\nbegin a\nget a\nget-stale a\n";
    let output = shell(&node, &[], script).await;
    let expected = "\
error: line 2: aborted: guard (the value of a key does not allow the operation)
error: line 3: unknown command \"jump\"; `help` lists all commands
error: line 4: no transaction is open; `begin` opens one
error: line 6: b is not declared as written; name it to the right of -> in `begin`
error: line 7: usage: add KEY NUMBER
error: line 9: refused: the current value of the key does not allow the operation; the transaction is still open
error: line 10: c is not declared as read; name it to the left of -> in `begin`
error: line 11: c1.3 is open; `commit` or `abort` it first
error: line 13: c1.3 is open, and `get-stale` is not possible in a transaction; `commit` or `abort` it first
error: c1.3 was still open at the end of the shell; it is aborted
";
    assert_eq!(text(&output.stderr), expected);
    assert_eq!(text(&output.stdout), "committed\na = 1\na = 9\n");
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(node.store.text("a").as_deref(), Some("1"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_outcome_is_never_called_aborted_and_can_be_asked_for_again() {
    let node = Node::start(&Arc::<Store>::default(), 0).await;
    // The write takes effect, its answer is lost, and for a while its outcome is unknown.
    node.twist(Call::Begin, [Twist::DoAndCut]);
    node.twist(Call::Resolve, std::iter::repeat_n(Twist::Unknown, 1_000));
    let output = shell(&node, &["--deadline", "500ms", "-e", "put a 1"], "").await;
    assert_eq!(output.status.code(), Some(1));
    let stderr = text(&output.stderr);
    assert!(stderr.contains("unknown: c1.1 may have committed or not"), "{stderr}");
    assert!(stderr.contains("use `resolve` to ask again"), "{stderr}");
    assert!(!stderr.contains("aborted"), "{stderr}");
    assert_eq!(node.store.text("a").as_deref(), Some("1"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_describes_itself_and_help_is_there() {
    let node = Node::start(&Arc::<Store>::default(), 0).await;
    let arguments = ["-e", "describe", "-e", "status", "-e", "help begin", "--timing"];
    let output = shell(&node, &arguments, "").await;
    let stdout = text(&output.stdout);
    for expected in [
        "keyspace   default: test, strict serializability",
        "gateway    in R0",
        "n1 R0",
        "p2",
        "serving",
        "open a transaction",
        " ms)",
    ] {
        assert!(stdout.contains(expected), "{expected:?} is not in {stdout}");
    }
    assert_eq!(output.status.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_order_is_one_command() {
    let store = Arc::<Store>::default();
    let (first, second) = (Node::start(&store, 0).await, Node::start(&store, 1).await);
    *store.leader.lock().unwrap() = 2;
    let both = format!("{},{}", first.address, second.address);
    let arguments = ["--connect", &both, "-e", "transfer-leader p0 n3"];
    let more = ["-e", "change-members p0 n1 n2 n3", "-e", "orders", "-e", "describe"];
    let output = shell_of([&arguments[..], &more].concat()).await;
    let stdout = text(&output.stdout);
    let expected = "n2 leads p0 and hands leadership to n3\nn2 has taken the order for p0; \
                    `orders` shows its state\nno node has taken an order since it started\n";
    assert!(stdout.starts_with(expected), "{stdout}{}", text(&output.stderr));
    assert_eq!(output.status.code(), Some(0));
    *store.leader.lock().unwrap() = 9;
    let output = shell(&first, &["-e", "transfer-leader p0 n3"], "").await;
    assert!(text(&output.stderr).contains("give the order to n9"), "{}", text(&output.stderr));
    assert_eq!(output.status.code(), Some(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_comes_from_a_file_and_mistakes_end_with_status_2() {
    let credential = Credential::token("a-long-secret-for-this-test-only").unwrap();
    let access = Access::only([(credential, Principal::new("ada", Role::Write))]).unwrap();
    let store = Arc::<Store>::default();
    let node = Node::start_with(&store, 0, "test", access, Limits::default()).await;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("token");
    std::fs::write(&path, "a-long-secret-for-this-test-only\n").unwrap();
    let file = path.to_str().unwrap();
    let output = shell(&node, &["--token-file", file, "-e", "put a 1"], "").await;
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    for (arguments, expected) in [
        (vec!["-e", "put a 1"], "not authenticated"),
        (vec!["--token-file", "/no/such/file"], "--token-file /no/such/file"),
        (vec!["--connect", "nowhere"], "host:port"),
    ] {
        let output = shell(&node, &arguments, "").await;
        let stderr = text(&output.stderr);
        assert!(stderr.contains(expected), "{stderr}");
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(!stderr.contains("a-long-secret"));
    }
}
