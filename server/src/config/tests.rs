use super::*;
use crate::node::Durability;
use orthodrome_core::PartitionId;
use proptest::prelude::*;

const GOOD: &str = r#"
cluster = "planet"
node = "n1"
data_dir = "data"
protocol = "carousel-basic"
topology = "local3"

[[nodes]]
id = "n1"
region = "A"
peer = "127.0.0.1:7001"
client = "127.0.0.1:7101"

[[nodes]]
id = "n2"
region = "B"
peer = "127.0.0.1:7002"
client = "127.0.0.1:7102"

[[nodes]]
id = "n3"
region = "C"
peer = "localhost:7003"

[placement]
partitions = 3
replicas = 3
"#;

fn parse(text: &str) -> Result<NodeConfig, String> {
    NodeConfig::parse(Path::new("/etc/node.toml"), text).map_err(|error| error.to_string())
}

#[test]
fn a_file_gives_a_node() {
    let config = parse(GOOD).unwrap();
    assert_eq!(config.node.data_dir, Path::new("/etc/data"));
    assert_eq!(config.audit_log, Path::new("/etc/data.audit.jsonl"));
    let elsewhere = format!("audit_log = \"/var/log/n1.jsonl\"\n{GOOD}");
    assert_eq!(parse(&elsewhere).unwrap().audit_log, Path::new("/var/log/n1.jsonl"));
    let inside = parse(&format!("audit_log = \"data/audit.jsonl\"\n{GOOD}")).unwrap_err();
    assert!(inside.contains("node.toml:1: audit_log: /etc/data/audit.jsonl is in"), "{inside}");
    assert_eq!(config.listen_peer, "127.0.0.1:7001");
    assert_eq!(config.protocol, "carousel-basic");
    assert_eq!(config.node.endpoints.len(), 3);
    let gateways: Vec<u32> = config.node.map.gateways().map(|node| node.id.0).collect();
    assert_eq!(gateways, [1_001, 1_002, 1_003]);
    assert_eq!(config.node.durability, Durability::Sync);
    let ranges = GOOD.replace(
        "partitions = 3\nreplicas = 3\n",
        r#"explicit = [
                { id = "p0", replicas = ["n1", "n2", "n3"], leader = "n1", start = "" },
                { id = "p1", replicas = ["n2"], leader = "n2", start = "m" },
            ]"#,
    );
    let map = parse(&ranges).unwrap().node.map;
    assert_eq!(map.partition_of(&"z".into()), PartitionId(1));
    assert_eq!(map.partitions().count(), 2);
}

#[test]
fn nodes_of_one_machine_share_a_clock_unless_the_file_says_otherwise() {
    let shares = |text: &str| parse(text).map(|config| config.node.shared_clock);
    assert_eq!(shares(GOOD), Ok(true));
    let with = |line: &str| GOOD.replacen("protocol", &format!("{line}\nprotocol"), 1);
    assert_eq!(shares(&with("shared_clock = false")), Ok(false));
    let apart = with("shared_clock = true").replace("127.0.0.1:7002", "10.0.0.2:7002");
    let error = shares(&apart).unwrap_err();
    assert!(error.contains("shared_clock") && error.contains("loopback"), "{error}");
}

#[test]
fn errors_name_the_place_and_the_remedy() {
    let inline =
        r#"{ name = "two", source = "x", local_rtt_ms = 1.0, regions = ["A"], rtt_ms = {} }"#;
    let cases: &[(&str, &str, &[&str])] = &[
        ("data_dir", "data_dri", &["/etc/node.toml:4:", "data_dri", "data_dir"]),
        ("\"n1\"\ndata", "\"x1\"\ndata", &["node.toml:3:", "x1"]),
        ("\"planet\"", "\"Planet!\"", &["cluster", "lower-case"]),
        ("node = \"n1\"", "node = \"n9\"", &["node:", "n9"]),
        ("carousel-basic", "carrousel", &["node.toml:5: protocol", "carousel-basic"]),
        ("\"local3\"", "\"atlantis\"", &["topology", "atlantis", "azure5"]),
        ("\"local3\"", "\"absent.toml\"", &["topology", "/etc/absent.toml"]),
        ("\"local3\"", inline, &["node.toml:16: nodes.n2.region", "\"B\""]),
        ("id = \"n2\"", "id = \"n1\"", &["n1", "twice"]),
        ("id = \"n2\"", "id = \"n1000\"", &["n1000", "n999"]),
        ("127.0.0.1:7002", "127.0.0.1:7001", &["node.toml:17: nodes.n2.peer", "address of n1"]),
        ("127.0.0.1:7002", "127.0.0.1", &["nodes.n2.peer", "host:port"]),
        ("127.0.0.1:7002", "127.0.0.1:99999", &["nodes.n2.peer", "host:port"]),
        ("127.0.0.1:7002", "10.1.1.1:7002", &["tls", "10.1.1.1", "certificates"]),
        ("region = \"B\"", "region = \"X\"", &["nodes.n2.region", "A, B, C"]),
        ("replicas = 3", "replicas = 5", &["placement", "5"]),
        ("replicas = 3", "replicas = 2", &["placement", "odd"]),
        ("partitions = 3\n", "", &["placement", "explicit"]),
        ("replicas = 3", "replicas = 3\nshares = 2", &["placement.shares"]),
        ("partitions = 3", "partitions = 0", &["placement.partitions", "1 to 10000"]),
        (
            "[placement]",
            "[limits]\nkey_bytes_max = 0\n[placement]",
            &["node.toml:26: limits.key_bytes_max"],
        ),
        (
            "[placement]",
            "[limits]\nrequest_bytes_max = 16777216\n[placement]",
            &["request_bytes_max"],
        ),
        ("[placement]", "[limits]\ntxns_in_flight_max = 0\n[placement]", &["in_flight"]),
        (
            "[placement]",
            "[limits]\npeer_queue_bytes_max = 9223372036854775807\n[placement]",
            &["limits.peer_queue_bytes_max", "at most"],
        ),
        (
            "[placement]",
            "[[principals]]\nname = \"a\"\nrole = \"read\"\n[placement]",
            &["principals.a", "token_file"],
        ),
        (
            "[placement]",
            "[[principals]]\nname = \"a\"\nrole = \"god\"\ntoken = \"x\"\n[placement]",
            &["god", "admin"],
        ),
        (
            "[placement]",
            "[[principals]]\nname = \"a\"\nrole = \"read\"\ntoken = \"x\"\n[placement]",
            &["principals.a.token", "16"],
        ),
        (
            "[placement]",
            "[[principals]]\nname = \"a\"\nrole = \"read\"\ntoken_sha256 = \"abc\"\n[placement]",
            &["principals.a.token_sha256", "64"],
        ),
        (
            "[placement]",
            "[[principals]]\nname = \"a\"\nrole = \"read\"\ncertificate_file = \"a.pem\"\n[placement]",
            &["principals.a.certificate_file", "/etc/a.pem"],
        ),
        (
            "[placement]",
            "[listen]\nclient = \"0.0.0.0:7101\"\n[placement]",
            &["listen.client", "principals"],
        ),
        (
            "[placement]",
            "[tls]\ncertificate = \"a\"\nkey = \"b\"\nauthority = \"c\"\n[placement]",
            &["tls", "/etc/a"],
        ),
        ("protocol", "clock_error_ms = 0\nprotocol", &["clock_error_ms", "1 to 10000"]),
        ("protocol", "shutdown_s = 86401\nprotocol", &["shutdown_s", "0 to 86400"]),
        ("protocol", "durability = \"maybe\"\nprotocol", &["maybe", "sync"]),
    ];
    for (from, to, wanted) in cases {
        let text = GOOD.replacen(from, to, 1);
        assert_ne!(text, GOOD, "{from:?} is not in the file");
        let message = parse(&text).map(|_| ()).unwrap_err();
        assert!(!message.contains('\n'), "more than one line: {message}");
        for part in *wanted {
            assert!(message.contains(part), "{message:?} does not name {part:?}");
        }
    }
    assert!(parse("").unwrap_err().contains("cluster"));
}

#[test]
fn a_principal_has_the_quota_that_its_entry_gives() {
    let with = |more: &str| {
        let entry =
            "[[principals]]\nname = \"shop\"\nrole = \"write\"\ntoken = \"a-token-of-the-shop\"\n";
        GOOD.replacen("[placement]", &format!("{entry}{more}\n[placement]"), 1)
    };
    for (more, expected) in [("high_priority_per_second = 7", "Some(7)"), ("", "None")] {
        let access = format!("{:?}", parse(&with(more)).unwrap().service.access);
        assert!(access.contains(&format!("high_priority_per_second: {expected}")), "{access}");
    }
    let error = parse(&with("high_priority_per_second = -1")).map(|_| ()).unwrap_err();
    assert!(error.contains("node.toml:29") && error.contains("-1"), "{error}");
}

fn example() -> Example {
    let node = |id: u32, region: &str| ExampleNode {
        id: NodeId(id),
        region: region.into(),
        peer: format!("127.0.0.1:{}", 7_000 + id),
        client: format!("127.0.0.1:{}", 7_100 + id),
    };
    Example {
        cluster: "planet".into(),
        node: NodeId(2),
        data_dir: "a \"strange\" name".into(),
        protocol: "carousel-basic".into(),
        topology: "local3".into(),
        nodes: vec![node(1, "A"), node(2, "B"), node(3, "C")],
        partitions: 3,
        replicas: 3,
        explicit: Vec::new(),
        emulate_wan: true,
        tls: None,
        principals: Vec::new(),
    }
}

#[test]
fn an_example_listens_for_redis_if_it_should() {
    let config = parse(&example().to_string()).unwrap();
    assert_eq!(config.listen_redis, None);
    let config = parse(&example().with_redis()).unwrap();
    assert_eq!(config.listen_redis.as_deref(), Some("127.0.0.1:6380"));
    let elsewhere = format!("{GOOD}\n[redis]\nlisten = \"10.0.0.1:6379\"\n");
    let error = parse(&elsewhere).unwrap_err();
    assert!(error.contains("redis.listen: 10.0.0.1:6379 is not a loopback address"), "{error}");
    let same = format!("{GOOD}\n[redis]\nlisten = \"127.0.0.1:7101\"\n");
    assert!(parse(&same).unwrap_err().contains("is used already"));
}

#[test]
fn an_example_can_place_each_partition() {
    let place = |names: &[u32]| names.iter().copied().map(NodeId).collect::<Vec<_>>();
    let explicit = vec![place(&[3, 1, 2]), place(&[2])];
    let config = parse(&Example { explicit, ..example() }.to_string()).unwrap();
    let map = &config.node.map;
    let placed: Vec<_> =
        map.partitions().map(|p| (p.preferred_leader, p.replicas.clone())).collect();
    assert_eq!(placed, [(NodeId(3), place(&[3, 1, 2])), (NodeId(2), place(&[2]))]);
}

#[test]
fn the_example_is_right_and_shows_every_default_as_it_is() {
    let text = example().to_string();
    let config = parse(&text).unwrap();
    assert_eq!(config.node.node, NodeId(2));
    assert!(config.node.emulate_wan);
    assert_eq!(config.node.data_dir, Path::new("/etc/a \"strange\" name"));
    let is_default = |line: &str| {
        line.strip_prefix('#')
            .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_lowercase()))
    };
    assert!(text.lines().filter(|line| is_default(line)).count() >= 18);
    let explicit: Vec<&str> =
        text.lines().map(|line| if is_default(line) { &line[1..] } else { line }).collect();
    let explicit = parse(&explicit.join("\n")).unwrap();
    assert_eq!(format!("{config:?}"), format!("{explicit:?}"));
}

/// The reader itself says which fields there are, when it meets one that there is not.
#[test]
fn the_example_explains_every_field() {
    let text = example().to_string();
    for table in [
        "",
        "[placement]",
        "[limits]",
        "[[nodes]]",
        "[listen]",
        "[tls]",
        "[client_tls]",
        "[[principals]]",
    ] {
        let mut broken: String = if table == "[placement]" || table == "[limits]" {
            String::new()
        } else {
            text.clone()
        };
        if table.is_empty() {
            broken.insert_str(0, "no_such_field = 1\n");
        } else {
            broken += &format!("\n{table}\nno_such_field = 1\n");
        }
        let error = parse(&broken).unwrap_err();
        assert!(error.contains("unknown field `no_such_field`"), "{table}: {error}");
        let known: Vec<&str> = error.split('`').skip(3).step_by(2).collect();
        assert!(known.len() >= 2, "{table}: {error}");
        for field in known {
            assert!(text.contains(field), "{table} {field} is not in the example");
        }
    }
}

proptest! {
    #![proptest_config(crate::fuzz_config())]

    #[test]
    fn arbitrary_text_never_panics(text in "\\PC{0,200}") {
        let _ = parse(&text);
    }

    #[test]
    fn damaged_files_never_panic(
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = GOOD.as_bytes().to_vec();
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(text) = String::from_utf8(bytes) {
            let _ = parse(&text);
        }
    }
}
