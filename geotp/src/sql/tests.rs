//! Statements through the whole of this module. Merged results are compared with those of one
//! unsharded SQLite database, which understands both kinds of quotes.

use orthodrome_core::ordered::{OrdMap, OrdSet};

use proptest::prelude::*;
use rusqlite::Connection;
use rusqlite::types::ValueRef;

use super::CopyForm;
use super::Refusal;
use super::catalog::{Catalogue, Dialect, SourceId};
use super::merge::merge;
use super::parse::{Isolation, Savepoint, Verb, parse, unread};
use super::plan::{Context, Keys, Plan, Record, plan};
use super::set::{self, Change, ConfigItem, Term, effects};
use super::typed::{Kinds, tables_to_know, tables_to_order};
use super::value::{Answer, Cell, Column, Kind, Value};

const FILE: &str = r#"
    [[sources]]
    name = "pg"
    kind = "postgresql"
    [[sources]]
    name = "maria"
    kind = "mariadb"
    [[sources]]
    name = "far"
    kind = "postgresql"
    [[tables]]
    name = "accounts"
    shard = { by = "hash", column = "id", sources = ["pg", "maria", "far"] }
    columns = ["id", "owner", "balance"]
    [[tables]]
    name = "entries"
    shard = { by = "hash", column = "account", sources = ["pg", "maria", "far"] }
    primary = ["account", "n"]
    [[tables]]
    name = "orders"
    shard = { by = "range", column = "id", parts = [
      { below = 100, source = "pg" }, { below = 200, source = "maria" }, { source = "far" }] }
    [[tables]]
    name = "offices"
    shard = { by = "list", column = "country", type = "text", parts = [
      { values = ["DE", "FR"], source = "pg" }, { values = ["JP"], source = "maria" }] }
    [[tables]]
    name = "currencies"
    broadcast = ["pg", "maria", "far"]
    [[tables]]
    name = "audit"
    single = "maria"
"#;

fn catalogue() -> Catalogue {
    Catalogue::parse(FILE).unwrap().with_databases(["bank".to_owned()].into())
}

fn context(client: Dialect, isolation: Isolation) -> Context {
    Context {
        client,
        isolation,
        prefer: vec![],
        kinds: Kinds::new(),
        collations: OrdMap::new(),
        by_key: false,
        default_source: None,
    }
}

fn planned(
    text: &str,
    client: Dialect,
    isolation: Isolation,
    parameters: &[Value],
) -> Result<Plan, Refusal> {
    let mut parsed = parse(text, client)?;
    assert_eq!(parsed.len(), 1, "{text}");
    let (Verb::Data(statement) | Verb::Schema(statement)) = parsed.remove(0).verb else {
        panic!("{text}: not read")
    };
    plan(&catalogue(), &statement, parameters, &context(client, isolation))
}

fn texts(text: &str, client: Dialect, isolation: Isolation) -> Vec<(u16, String)> {
    let plan = planned(text, client, isolation, &[]).unwrap_or_else(|e| panic!("{text}: {e}"));
    plan.parts.into_iter().map(|p| (p.source.0, p.text)).collect()
}

fn sources(text: &str) -> Vec<u16> {
    texts(text, Dialect::PostgreSql, Isolation::RepeatableRead)
        .into_iter()
        .map(|(s, _)| s)
        .collect()
}

fn refused(text: &str, client: Dialect, isolation: Isolation, because: &str) {
    match planned(text, client, isolation, &[]) {
        Ok(plan) => panic!("{text}: planned as {plan:?}"),
        Err(refusal) => assert!(refusal.message.contains(because), "{text}: {refusal}"),
    }
}

const PG: Dialect = Dialect::PostgreSql;
const MARIA: Dialect = Dialect::MariaDb;
const SER: Isolation = Isolation::Serializable;
const RR: Isolation = Isolation::RepeatableRead;

#[test]
fn a_text_is_cut_at_semicolons_that_are_not_quoted() {
    let text = "BEGIN; SELECT ';', \";\" /* ; */ -- ;\n; /*last query*/ SELECT $a$;$a$; COMMIT;";
    let parsed = parse(text, PG).unwrap();
    assert_eq!(parsed.len(), 4);
    assert_eq!(parsed.iter().map(|p| p.is_last).collect::<Vec<_>>(), [false, false, true, false]);
    let maria = parse(
        r"SELECT 'a\';b'; # ;
        SELECT `;`",
        MARIA,
    )
    .unwrap();
    assert_eq!(maria.len(), 2);
    assert!(parse("SELECT 'open", PG).is_err() && parse("/* open", PG).is_err());
}

#[test]
fn words_that_are_not_about_rows() {
    let verb = |text: &str, dialect| parse(text, dialect).unwrap().remove(0).verb;
    assert!(matches!(verb("END", PG), Verb::Commit { .. }));
    assert!(matches!(
        verb("ROLLBACK TO SAVEPOINT a", PG),
        Verb::Savepoint(Savepoint::RollbackTo, _)
    ));
    assert!(matches!(verb("DISCARD ALL", PG), Verb::DiscardAll));
    assert!(matches!(verb("DISCARD PLANS", PG), Verb::Housekeeping("DISCARD PLANS")));
    assert!(matches!(verb("DEALLOCATE ALL", PG), Verb::Deallocate(None)));
    assert!(
        matches!(verb("DEALLOCATE PREPARE _p1", PG), Verb::Deallocate(Some(name)) if name == "_p1")
    );
    assert!(
        matches!(verb("SHOW TRANSACTION ISOLATION LEVEL", PG), Verb::Show(name) if name == "transaction_isolation")
    );
    assert!(
        matches!(verb("SHOW ORTHODROME TRANSACTIONS", MARIA), Verb::Admin(words) if words == ["show", "transactions"])
    );
    assert!(matches!(verb("USE bank", MARIA), Verb::Use(name) if name == "bank"));
    assert!(parse("PREPARE TRANSACTION 'x'", PG).is_err() && parse("XA START 'x'", MARIA).is_err());
}

#[test]
fn rows_that_an_insert_returns_come_in_its_order() {
    let text = "INSERT INTO orders (id) VALUES (250), (1), (150), (2) RETURNING id";
    let plan = planned(text, PG, RR, &[]).unwrap();
    let answer = |ids: &[&str]| Answer {
        columns: vec![Column { name: "id".into(), kind: Kind::Int4, oid: 23 }],
        rows: ids.iter().map(|id| vec![Some(id.as_bytes().to_vec())]).collect(),
        affected: ids.len() as u64,
        ..Answer::default()
    };
    let ids = |answers: Vec<Answer>| -> Vec<String> {
        let whole = merge(&plan.merge, answers).unwrap();
        whole
            .rows
            .into_iter()
            .map(|row| String::from_utf8(row[0].clone().unwrap()).unwrap())
            .collect()
    };
    let all = vec![answer(&["1", "2"]), answer(&["150"]), answer(&["250"])];
    assert_eq!(ids(all), ["250", "1", "150", "2"]);
    // ON CONFLICT has left a row out.
    let fewer = vec![answer(&["2"]), answer(&["150"]), answer(&["250"])];
    assert_eq!(ids(fewer), ["2", "150", "250"]);
}

#[test]
fn limits_may_be_cast_or_in_the_words_of_the_standard() {
    for limit in
        ["LIMIT 2::integer", "LIMIT CAST(2 AS bigint)", "FETCH FIRST 2 ROWS ONLY", "LIMIT (2)"]
    {
        let text = format!("SELECT id FROM orders ORDER BY id {limit}");
        let plan = planned(&text, PG, RR, &[]).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(plan.merge.to_string(), "merged, sorted, cut", "{text}");
    }
    let offset = "SELECT id FROM orders ORDER BY id OFFSET 1 ROWS FETCH NEXT ROW ONLY";
    assert_eq!(planned(offset, PG, RR, &[]).unwrap().merge.to_string(), "merged, sorted, cut");
    refused("SELECT id FROM orders LIMIT 2::text", PG, RR, "must be integers");
}

#[test]
fn types_and_hints_are_understood() {
    let created = "CREATE TYPE mood AS ENUM ('sad', 'it''s')";
    assert_eq!(texts(created, PG, RR), [(0, created.to_owned()), (2, created.to_owned())]);
    let hinted = "SELECT /*!40001 SQL_NO_CACHE */ `id` FROM orders WHERE id = 5";
    assert_eq!(
        texts(hinted, MARIA, RR),
        [(0, "SELECT \"id\" FROM orders WHERE id = 5".to_owned())]
    );
}

#[test]
fn keys_choose_sources() {
    assert_eq!(sources("SELECT * FROM orders WHERE id = ANY('{5,150}')"), [0, 1]);
    assert_eq!(sources("SELECT * FROM orders WHERE id = 5"), [0]);
    assert_eq!(sources("SELECT * FROM orders WHERE id = '150'"), [1]);
    assert_eq!(sources("SELECT * FROM orders o WHERE o.id BETWEEN 90 AND 110"), [0, 1]);
    assert_eq!(
        sources("SELECT * FROM orders WHERE id >= 200 OR id = 7"),
        [0, 1, 2],
        "a range in an OR is not used"
    );
    assert_eq!(sources("SELECT * FROM orders WHERE id = 300 OR id IN (7, 8)"), [0, 2]);
    assert_eq!(sources("SELECT * FROM orders WHERE id < 100"), [0]);
    assert_eq!(sources("SELECT * FROM orders WHERE 199 < id"), [2]);
    assert_eq!(sources("SELECT * FROM orders WHERE id > 150 AND id < 180"), [1]);
    assert_eq!(
        sources("SELECT * FROM orders WHERE id = 1 AND id = 101"),
        [0],
        "no row can match; one source says so"
    );
    assert_eq!(sources("SELECT * FROM orders WHERE id = -5"), [0]);
    assert_eq!(sources("SELECT * FROM offices WHERE country = 'JP'"), [1]);
    assert_eq!(sources("SELECT * FROM audit"), [1]);
    assert_eq!(sources("SELECT * FROM currencies"), [0]);
    assert_eq!(sources("UPDATE currencies SET rate = 2"), [0, 1, 2]);
    assert_eq!(sources("DELETE FROM orders WHERE total = 0"), [0, 1, 2]);
    assert_eq!(sources("SELECT 1").len(), 0);
    let bound =
        planned("SELECT * FROM orders WHERE id = $1", PG, RR, &[Value::Number("150".into())])
            .unwrap();
    assert_eq!(bound.parts[0].source, SourceId(1));
    assert_eq!(bound.parts[0].text, "SELECT * FROM orders WHERE id = 150");
}

#[test]
fn joins_that_one_source_can_answer() {
    let all = [0, 1, 2];
    assert_eq!(sources("SELECT * FROM accounts a JOIN entries e ON a.id = e.account"), all);
    assert_eq!(
        sources("SELECT * FROM accounts a, entries e WHERE e.account = a.id AND a.id = 7").len(),
        1
    );
    assert_eq!(
        sources("SELECT * FROM accounts a, entries e WHERE e.account = a.id AND a.id = 7"),
        sources("SELECT * FROM accounts a, entries e WHERE e.account = a.id AND e.account = 7"),
    );
    assert_eq!(sources("SELECT * FROM accounts a LEFT JOIN entries e ON a.id = e.account"), all);
    assert_eq!(sources("SELECT * FROM accounts a JOIN currencies c ON a.currency = c.id"), all);
    assert_eq!(sources("SELECT * FROM orders o JOIN audit a ON a.id = o.id WHERE o.id = 150"), [1]);
    refused("SELECT * FROM accounts a JOIN entries e ON a.id = e.n", PG, RR, "not sharded equally");
    refused("SELECT * FROM accounts a JOIN orders o ON a.id = o.id", PG, RR, "not sharded equally");
    refused(
        "SELECT * FROM currencies c LEFT JOIN accounts a ON a.currency = c.id",
        PG,
        RR,
        "outer join keeps rows",
    );
    refused("SELECT * FROM accounts a JOIN audit x ON x.id = a.id", PG, RR, "is at one source");
    refused("SELECT * FROM orders WHERE id IN (SELECT id FROM audit)", PG, RR, "several sources");
    assert_eq!(
        sources("SELECT * FROM orders WHERE id = 150 AND id IN (SELECT id FROM audit)"),
        [1]
    );
    assert_eq!(sources("WITH x AS (SELECT * FROM audit) SELECT * FROM x"), [1]);
    refused("SELECT * FROM nowhere", PG, RR, "no source has such a table");
    refused("SELECT id FROM orders UNION SELECT id FROM accounts", PG, RR, "several sources");
    // A condition of an outer join does not restrict the rows that it keeps.
    assert_eq!(
        sources(
            "SELECT * FROM accounts a LEFT JOIN entries e ON a.id = e.account AND e.account = 7"
        ),
        all
    );
}

#[test]
fn rows_of_an_insert_go_where_they_live() {
    let parts = texts(
        "INSERT INTO orders (id, t) VALUES (1, 'a'), (150, 'b'), (2, 'c'), (250, 'd')",
        PG,
        SER,
    );
    assert_eq!(
        parts,
        [
            (0, "INSERT INTO orders (id, t) VALUES (1, 'a'), (2, 'c')".to_owned()),
            (1, "INSERT INTO orders (id, t) VALUES (150, 'b')".to_owned()),
            (2, "INSERT INTO orders (id, t) VALUES (250, 'd')".to_owned()),
        ]
    );
    assert_eq!(
        texts("INSERT INTO accounts VALUES (1, 'x', 2)", PG, SER).len(),
        1,
        "columns from the catalogue"
    );
    refused("INSERT INTO orders VALUES (1)", PG, SER, "list the columns");
    refused("INSERT INTO orders (t) VALUES ('a')", PG, SER, "has no value for \"id\"");
    refused("INSERT INTO orders (id) VALUES (now())", PG, SER, "must be a constant");
    refused("INSERT INTO offices (country) VALUES ('US')", PG, SER, "no source is listed");
    refused("INSERT INTO orders (id) SELECT id FROM audit", PG, SER, "placed one by one");
    refused("INSERT INTO currencies (id, at) VALUES (1, now())", PG, SER, "now()");
    refused("UPDATE orders SET id = 7 WHERE id = 5", PG, SER, "cannot be changed");
    refused(
        "INSERT INTO orders (id, n) VALUES (150, 1) ON CONFLICT (id) DO UPDATE SET n = 2",
        PG,
        SER,
        "differs between",
    );
    assert_eq!(
        texts(
            "INSERT INTO orders (id, n) VALUES (5, 1) ON CONFLICT (id) DO UPDATE SET n = 2",
            PG,
            SER
        )
        .len(),
        1
    );
}

#[test]
fn a_schema_or_database_that_the_proxy_does_not_show_is_refused() {
    for (text, told) in [
        (
            "SELECT public.audit.a, public.audit.* FROM public.audit",
            "SELECT audit.a, audit.* FROM audit",
        ),
        ("DELETE FROM bank.public.audit", "DELETE FROM audit"),
        ("SELECT id FROM public.orders WHERE id = 1", "SELECT id FROM public.orders WHERE id = 1"),
        (
            "DELETE FROM \"public\".orders WHERE id = 1",
            "DELETE FROM \"public\".orders WHERE id = 1",
        ),
        ("TRUNCATE TABLE public.audit", "TRUNCATE TABLE audit"),
        ("DROP TABLE public.audit", "DROP TABLE audit"),
        ("WITH s AS (SELECT 1) SELECT * FROM audit", "WITH s AS (SELECT 1) SELECT * FROM audit"),
    ] {
        assert_eq!(texts(text, PG, RR)[0].1, told, "{text}");
    }
    let told = "SELECT \"orders\".n FROM orders WHERE id = 1";
    let text = "SELECT bank.`orders`.n FROM bank.orders WHERE id = 1";
    assert_eq!(texts(text, MARIA, RR)[0].1, told);
    assert_eq!(texts("DROP TABLE bank.audit", MARIA, RR)[0].1, "DROP TABLE audit");
    for text in [
        "SELECT * FROM s4.audit",
        "SELECT * FROM \"Public\".audit",
        "SELECT * FROM accounts JOIN s4.entries ON account = id",
        "SELECT (SELECT count(*) FROM s4.audit)",
        "DELETE FROM s4.audit",
        "UPDATE s4.orders SET n = 1 WHERE id = 1",
        "INSERT INTO s4.orders (id) VALUES (1)",
        "INSERT INTO audit (id) SELECT id FROM s4.audit",
        "TRUNCATE s4.audit",
        "DROP TABLE s4.audit",
        "DROP INDEX s4.i",
        "ALTER TABLE s4.audit ADD COLUMN x int",
        "CREATE TABLE s4.t (id int)",
        "CREATE TABLE t (id int REFERENCES s4.audit)",
        "CREATE INDEX i ON s4.audit (a)",
        "CREATE VIEW s4.v AS SELECT 1",
        "CREATE VIEW v AS SELECT * FROM s4.audit",
        "COMMENT ON TABLE s4.audit IS 'x'",
    ] {
        let refusal = planned(text, PG, RR, &[]).expect_err(text);
        let is_it = refusal.sqlstate == "3F000" || text.contains("Public");
        assert!(is_it && refusal.message.contains("does not exist"), "{text}: {refusal}");
        if !text.contains('"') && !text.starts_with("COMMENT") {
            let refusal = planned(&text.replace("s4.", "other."), MARIA, RR, &[]).expect_err(text);
            assert!(refusal.message.starts_with("Table 'other."), "{text}: {refusal}");
        }
    }
    refused("SELECT * FROM x.public.audit", PG, RR, "cross-database references");
    refused("ALTER TABLE audit RENAME TO other.audit", MARIA, RR, "Table 'other.audit'");
    // What belongs to the sources does not become a table of the same name.
    let renamed = FILE.replace("name = \"audit\"", "name = \"tables\"");
    let catalogue = Catalogue::parse(&renamed).unwrap();
    let Verb::Data(statement) =
        parse("SELECT * FROM information_schema.tables", PG).unwrap().remove(0).verb
    else {
        panic!("not read")
    };
    assert_eq!(plan(&catalogue, &statement, &[], &context(PG, RR)).unwrap().parts, []);
    let shown = catalogue.with_schemas(["app".to_owned()].into());
    let Verb::Data(statement) =
        parse("SELECT id FROM app.orders WHERE id = 1", PG).unwrap().remove(0).verb
    else {
        panic!("not read")
    };
    let found = plan(&shown, &statement, &[], &context(PG, RR)).unwrap();
    assert_eq!(found.parts[0].text, "SELECT id FROM orders WHERE id = 1");
}

#[test]
fn each_source_is_told_in_its_own_words() {
    let text = |text: &str, client| texts(text, client, RR).remove(0).1;
    assert_eq!(
        text(r#"SELECT "Name" FROM audit WHERE note = 'it''s \n "x"'"#, PG),
        r#"SELECT `Name` FROM audit WHERE note = 'it''s \n "x"'"#
    );
    assert_eq!(
        text(r#"SELECT `a``b` FROM orders WHERE id = 1 AND t = "x'y""#, MARIA),
        r#"SELECT "a`b" FROM orders WHERE id = 1 AND t = 'x''y'"#
    );
    assert_eq!(text(r"SELECT 'a\'b' FROM audit", MARIA), "SELECT 'a''b' FROM audit");
    assert_eq!(
        text("SELECT a || b, c::int FROM public.audit", PG),
        "SELECT concat(a, b), CAST(c AS SIGNED) FROM audit"
    );
    assert_eq!(
        text("SELECT ifnull(a, 0) FROM orders WHERE id = 1", MARIA),
        "SELECT coalesce(a, 0) FROM orders WHERE id = 1"
    );
    assert_eq!(
        text("SELECT id FROM audit ORDER BY id", PG),
        "SELECT id FROM audit ORDER BY id IS NULL, id"
    );
    assert_eq!(
        text("SELECT id FROM audit ORDER BY id DESC", PG),
        "SELECT id FROM audit ORDER BY id IS NULL DESC, id DESC"
    );
    assert_eq!(
        text("SELECT n FROM orders WHERE id = 1 ORDER BY n", MARIA),
        "SELECT n FROM orders WHERE id = 1 ORDER BY n NULLS FIRST"
    );
    for (text, because) in [
        ("SELECT a / 2 FROM audit", "division of integers"),
        ("SELECT DISTINCT ON (a) a, b FROM audit", "MariaDB has no DISTINCT ON"),
        ("SELECT a FROM audit, LATERAL (SELECT 1) x", "MariaDB has no LATERAL"),
        ("SELECT x.a FROM audit x FULL JOIN audit y ON x.a = y.a", "MariaDB has no FULL JOIN"),
        ("SELECT a, count(*) FROM audit GROUP BY ROLLUP (a)", "MariaDB has no ROLLUP"),
        ("SELECT a FROM audit WHERE b IN (SELECT DISTINCT ON (a) b FROM audit)", "DISTINCT ON"),
        ("SELECT count(*) FILTER (WHERE a > 1) FROM audit", "MariaDB has no FILTER"),
    ] {
        refused(text, PG, RR, because);
    }
}

#[test]
fn parameters_cannot_become_anything_but_values() {
    let text = |value: Value| {
        let plan = planned(
            "SELECT -$1 FROM audit WHERE note = $2",
            PG,
            RR,
            &[value, Value::Text("'; DROP TABLE audit; --".into())],
        );
        plan.unwrap().parts.remove(0).text
    };
    assert_eq!(
        text(Value::Number("-5".into())),
        "SELECT -(-5) FROM audit WHERE note = '''; DROP TABLE audit; --'"
    );
    assert!(text(Value::Number("1; DROP".into())).starts_with("SELECT -'1; DROP'"));
    assert!(text(Value::Bytes(vec![0, 39])).starts_with("SELECT -X'0027'"));
    assert!(planned("SELECT $1 FROM audit", PG, RR, &[]).is_err());
}

#[test]
fn serializable_reads_lock() {
    let text = |text: &str| texts(text, PG, SER).remove(0).1;
    assert_eq!(
        text("SELECT * FROM orders WHERE id = 1"),
        "SELECT * FROM orders WHERE id = 1 FOR SHARE"
    );
    assert_eq!(
        text("SELECT * FROM orders WHERE id = 1 FOR UPDATE"),
        "SELECT * FROM orders WHERE id = 1 FOR UPDATE"
    );
    assert_eq!(
        text("SELECT * FROM audit WHERE id = 1"),
        "SELECT * FROM audit WHERE id = 1 LOCK IN SHARE MODE"
    );
    assert_eq!(
        texts("SELECT * FROM orders WHERE id = 1", PG, RR).remove(0).1,
        "SELECT * FROM orders WHERE id = 1"
    );
    let plan =
        planned("SELECT count(*) FROM orders WHERE id = 1 AND total > 5", PG, SER, &[]).unwrap();
    assert_eq!(
        plan.parts[0].prelude,
        [
            "SELECT count(*) FROM (SELECT 1 FROM orders WHERE id = 1 AND total > 5 FOR SHARE) AS orthodrome_locked"
        ]
    );
    assert_eq!(plan.parts[0].text, "SELECT count(*) FROM orders WHERE id = 1 AND total > 5");
    let outer = "SELECT * FROM orders o LEFT JOIN currencies c ON c.id = o.c WHERE o.id = 1";
    let plan = planned(outer, PG, SER, &[]).unwrap();
    assert_eq!(plan.parts[0].text, format!("{outer} FOR SHARE OF o"));
    assert_eq!(
        plan.parts[0].prelude,
        [
            "SELECT count(*) FROM (SELECT 1 FROM orders o INNER JOIN currencies c ON c.id = o.c WHERE o.id = 1 \
             FOR SHARE OF c) AS orthodrome_locked"
        ]
    );
    refused(&outer.replace("LEFT", "RIGHT"), PG, SER, "outer join");
    assert_eq!(
        text("UPDATE orders SET n = (SELECT max FROM currencies WHERE id = 2) WHERE id = 1"),
        "UPDATE orders SET n = (SELECT max FROM currencies WHERE id = 2 FOR SHARE) WHERE id = 1",
    );
}

#[test]
fn records_are_known_by_their_keys() {
    let records = |text: &str| -> Vec<String> {
        let plan = planned(text, PG, SER, &[]).unwrap();
        plan.parts
            .iter()
            .flat_map(|p| p.records.iter().map(|r| format!("{}:{}[{}]", p.source, r.table, r.key)))
            .collect()
    };
    assert_eq!(
        records("UPDATE orders SET n = 1 WHERE id IN (1, 150)"),
        ["s0:orders[1]", "s1:orders[150]"]
    );
    assert_eq!(records("SELECT * FROM entries WHERE account = 7 AND n IN (1, 2)").len(), 2);
    assert!(records("SELECT * FROM orders WHERE total = 5").is_empty());
    assert_eq!(
        records("INSERT INTO orders (id) VALUES (1), (2)"),
        ["s0:orders[1]", "s0:orders[2]"]
    );
}

#[test]
fn keys_at_postgresql_are_seen_to() {
    let keys = |text: &str, level: Isolation| -> Vec<(SourceId, Keys)> {
        let plan = planned(text, PG, level, &[]).unwrap();
        plan.parts.into_iter().map(|part| (part.source, part.keys)).collect()
    };
    let one = |text: &str| keys(text, SER).remove(0).1;
    let conditions = |records: &[Record]| -> Vec<String> {
        records.iter().map(|r| format!("{} {}", r.key, r.condition)).collect()
    };
    let spread = keys("SELECT * FROM orders WHERE id IN (1, 150)", SER);
    assert_eq!(conditions(&spread[0].1.sought), ["1 \"id\" = '1'"]);
    // MariaDB's own gap locks do it.
    assert_eq!(spread[1], (SourceId(1), Keys::default()));
    refused("UPDATE entries SET n = 3 WHERE account = 7 AND n = 1", PG, SER, "name a row");
    assert!(one("DELETE FROM orders WHERE id = 1").is_delete);
    assert_eq!(one("SELECT * FROM orders WHERE id > 1 AND id < 9"), Keys::default());
    assert_eq!(one("SELECT * FROM orders WHERE id = 1 FOR UPDATE SKIP LOCKED"), Keys::default());
    let inserted = one("INSERT INTO orders (id, t) VALUES (1, 'a'), (2, 'b')");
    assert_eq!((conditions(&inserted.inserted).len(), inserted.sought.len()), (2, 0));
    let many: Vec<String> =
        (0..99).flat_map(|id| [id, -id - 1]).map(|id| format!("({id})")).collect();
    let many =
        one(&format!("INSERT INTO orders (id) VALUES {}, {}", many.join(","), many.join(",")));
    assert_eq!((many.inserted.len(), many.filled), (256, vec!["orders".to_owned()]));
    assert!(
        keys("SELECT * FROM orders WHERE id = 1", Isolation::ReadCommitted)[0].1.sought.is_empty()
    );
    let ids: Vec<String> = (-300..0).map(|id| id.to_string()).collect();
    refused(
        &format!("SELECT * FROM orders WHERE id IN ({})", ids.join(",")),
        PG,
        SER,
        "must lock each",
    );
}

/// What is inserted and what is looked for must be called the same.
#[test]
fn a_record_has_one_name() {
    let names = |text: &str| -> Vec<String> {
        let plan = planned(text, PG, SER, &[]).unwrap();
        plan.parts.iter().flat_map(|p| p.records.iter().map(|r| r.key.clone())).collect()
    };
    for (inserted, sought) in [
        ("INSERT INTO orders (id) VALUES (5)", "SELECT 1 FROM orders WHERE '5' = id"),
        ("INSERT INTO orders (id) VALUES ('5')", "SELECT 1 FROM orders WHERE id IN (5::int)"),
        (
            "INSERT INTO entries (account, n) VALUES (7, 1)",
            "SELECT 1 FROM entries WHERE n = '1' AND account = 7",
        ),
        (
            "INSERT INTO entries (n, account) VALUES ('01', 7)",
            "SELECT 1 FROM entries WHERE n = '01' AND account = 7",
        ),
    ] {
        assert_eq!(names(inserted), names(sought), "{inserted}");
        assert_eq!(names(inserted).len(), 1, "{inserted}");
    }
}

#[test]
fn what_cannot_be_merged_is_refused() {
    for (text, because) in [
        ("SELECT sum(total) / count(*) FROM orders", "expression of aggregates"),
        ("SELECT count(DISTINCT t) FROM orders", "DISTINCT"),
        ("SELECT t, count(*) FROM orders GROUP BY t HAVING count(*) > 1", "HAVING"),
        ("SELECT row_number() OVER (ORDER BY t) FROM orders", "window"),
        ("SELECT DISTINCT ON (t) t FROM orders", "DISTINCT ON"),
        ("SELECT string_agg(t, ',') FROM orders", "string_agg"),
        ("SELECT t, count(*) FROM orders", "must be grouped or aggregated"),
        ("SELECT DISTINCT t FROM orders ORDER BY id", "must name columns"),
    ] {
        refused(text, PG, RR, because);
    }
    let explained =
        planned("SELECT t, count(*) FROM orders GROUP BY t ORDER BY 2 DESC LIMIT 3", PG, RR, &[])
            .unwrap();
    assert_eq!(
        explained.explain(&catalogue())[0],
        "Route: 3 sources, merged, grouped, sorted, cut"
    );
}

#[test]
fn a_catalogue_that_cannot_be_right_is_refused() {
    for (from, to, field) in [
        ("kind = \"mariadb\"", "kind = \"oracle\"", "oracle"),
        ("name = \"far\"", "name = \"pg\"", "sources.pg: listed twice"),
        ("single = \"maria\"", "single = \"mars\"", "tables.audit.single: unknown source `mars`"),
        ("single = \"maria\"", "", "tables.audit.shard: the placement is missing"),
        ("below = 200", "below = 50", "tables.orders.shard.parts: below = 50 does not ascend"),
        ("values = [\"JP\"]", "values = [\"DE\"]", "DE is listed twice"),
        ("values = [\"JP\"]", "values = [81]", "81 is not text"),
        ("name = \"entries\"", "name = \"Accounts\"", "tables.accounts: listed twice"),
    ] {
        let error = Catalogue::parse(&FILE.replacen(from, to, 1)).unwrap_err();
        assert!(error.to_string().contains(field), "{error}");
    }
}

/// Rows that were placed must be found for ever.
#[test]
fn hashes_do_not_change() {
    use super::value::Key;
    assert_eq!(Key::Int(0).hash(), HASHES[0]);
    assert_eq!(Key::Int(-1).hash(), HASHES[1]);
    assert_eq!(Key::Text("Zürich".into()).hash(), HASHES[2]);
    let mut counts = [0_u32; 4];
    (0..10_000).for_each(|n| counts[(Key::Int(n).hash() % 4) as usize] += 1);
    assert!(counts.iter().all(|n| (2_300..2_700).contains(n)), "{counts:?}");
}

const HASHES: [u64; 3] = [0x68752350ae1d483f, 0xbe9bb22066375ef1, 0xc65e9341af283a5d];

/// Three shards and an unsharded copy, all in SQLite.
struct World {
    catalogue: Catalogue,
    shards: Vec<Connection>,
    whole: Connection,
}

const SHARDED: &str = r#"
    [[sources]]
    name = "a"
    kind = "mariadb"
    [[sources]]
    name = "b"
    kind = "mariadb"
    [[sources]]
    name = "c"
    kind = "mariadb"
    [[tables]]
    name = "t"
    shard = { by = "hash", column = "id", sources = ["a", "b", "c"] }
    [[tables]]
    name = "u"
    shard = { by = "hash", column = "tid", sources = ["a", "b", "c"] }
"#;

type RowT = (i64, Option<i64>, Option<String>, Option<i64>);

impl World {
    fn new(rows: &[RowT], others: &[(i64, i64)]) -> Self {
        let catalogue = Catalogue::parse(SHARDED).unwrap();
        let open = || {
            let db = Connection::open_in_memory().unwrap();
            db.execute_batch("CREATE TABLE t (id INTEGER, g INTEGER, s TEXT, n INTEGER); CREATE TABLE u (tid INTEGER, v INTEGER)").unwrap();
            db
        };
        let world = Self { catalogue, shards: (0..3).map(|_| open()).collect(), whole: open() };
        let number = |v: &Option<i64>| v.map_or("NULL".to_owned(), |v| v.to_string());
        for (id, g, s, n) in rows {
            let s = s.as_ref().map_or("NULL".to_owned(), |s| format!("'{s}'"));
            world.change(&format!(
                "INSERT INTO t (id, g, s, n) VALUES ({id}, {}, {s}, {})",
                number(g),
                number(n)
            ));
        }
        for (tid, v) in others {
            world.change(&format!("INSERT INTO u (tid, v) VALUES ({tid}, {v})"));
        }
        world
    }

    fn plan(&self, text: &str) -> Plan {
        let Verb::Data(statement) = parse(text, MARIA).unwrap().remove(0).verb else {
            panic!("{text}: not read")
        };
        plan(&self.catalogue, &statement, &[], &context(MARIA, RR))
            .unwrap_or_else(|e| panic!("{text}: {e}"))
    }

    fn change(&self, text: &str) {
        for part in self.plan(text).parts {
            self.shards[usize::from(part.source.0)].execute_batch(&part.text).unwrap();
        }
        self.whole.execute_batch(text).unwrap();
    }

    fn ask(db: &Connection, text: &str) -> Answer {
        let mut statement = db.prepare(text).unwrap_or_else(|e| panic!("{text}: {e}"));
        let names: Vec<String> = statement.column_names().iter().map(|n| (*n).to_owned()).collect();
        let mut kinds = vec![Kind::Other; names.len()];
        let mut found = Vec::new();
        let mut rows = statement.query([]).unwrap();
        while let Some(row) = rows.next().unwrap() {
            let mut cells: Vec<Cell> = Vec::new();
            for (i, kind) in kinds.iter_mut().enumerate() {
                let (cell, found) = match row.get_ref(i).unwrap() {
                    ValueRef::Null => (None, *kind),
                    ValueRef::Integer(n) => (Some(n.to_string().into_bytes()), Kind::Int8),
                    ValueRef::Real(x) => (Some(x.to_string().into_bytes()), Kind::Float8),
                    ValueRef::Text(t) => (Some(t.to_vec()), Kind::Text),
                    ValueRef::Blob(b) => (Some(b.to_vec()), Kind::Bytes),
                };
                *kind = found;
                cells.push(cell);
            }
            found.push(cells);
        }
        let columns = names
            .into_iter()
            .zip(kinds)
            .map(|(name, kind)| Column { name, kind, oid: 0 })
            .collect();
        Answer { columns, affected: found.len() as u64, rows: found, ..Answer::default() }
    }

    /// The merged answer and the whole one.
    fn both(&self, text: &str) -> (Answer, Answer) {
        let plan = self.plan(text);
        let mut answers: Vec<Answer> = plan
            .parts
            .iter()
            .map(|p| Self::ask(&self.shards[usize::from(p.source.0)], &p.text))
            .collect();
        // A source knows its columns' kinds with no row to look at; SQLite does not.
        let width = answers[0].columns.len();
        for i in 0..width {
            let kind = answers
                .iter()
                .map(|a| a.columns[i].kind)
                .find(|k| *k != Kind::Other)
                .unwrap_or(Kind::Other);
            answers.iter_mut().for_each(|a| a.columns[i].kind = kind);
        }
        (
            merge(&plan.merge, answers).unwrap_or_else(|e| panic!("{text}: {e}")),
            Self::ask(&self.whole, text),
        )
    }
}

/// SQL without order in it, by what is compared: a bag of rows, or rows in order.
const BAGS: [&str; 13] = [
    "SELECT * FROM t",
    "SELECT s, id FROM t WHERE n > 3",
    "SELECT DISTINCT g FROM t",
    "SELECT DISTINCT g, s FROM t WHERE id > 4",
    "SELECT count(*), sum(n), min(n), max(n), min(s), max(s) FROM t",
    "SELECT count(n), coalesce(sum(n), 0) FROM t WHERE g = 1",
    "SELECT g, count(*), sum(n) FROM t GROUP BY g",
    "SELECT count(*) AS k, s FROM t GROUP BY g, s",
    "SELECT id, count(*) FROM t GROUP BY id HAVING count(*) > 1",
    "SELECT count(DISTINCT id) FROM t",
    "SELECT t.s, u.v FROM t JOIN u ON t.id = u.tid",
    "SELECT t.id, u.v FROM t LEFT JOIN u ON t.id = u.tid WHERE t.id IN (1, 2, 3, 4, 5)",
    "SELECT sum(u.v), t.g FROM t, u WHERE t.id = u.tid GROUP BY t.g",
];
const LISTS: [&str; 10] = [
    "SELECT id, g FROM t ORDER BY id, g, s, n",
    "SELECT * FROM t ORDER BY n, id, g, s",
    "SELECT s FROM t ORDER BY s DESC, id, n LIMIT 5",
    "SELECT id, s FROM t ORDER BY s, id, g, n LIMIT 4 OFFSET 3",
    "SELECT id FROM t ORDER BY n DESC, id LIMIT 2, 3",
    "SELECT g, sum(n) AS total FROM t GROUP BY g ORDER BY total DESC, g LIMIT 2",
    "SELECT g FROM t GROUP BY g ORDER BY count(*), g",
    "SELECT DISTINCT s FROM t ORDER BY s LIMIT 3",
    "SELECT id, count(*) FROM t GROUP BY id ORDER BY 2 DESC, 1 LIMIT 3",
    "SELECT s, count(*) FROM t WHERE id < 6 GROUP BY s ORDER BY s LIMIT 2 OFFSET 1",
];

fn text_of(row: &[Cell]) -> Vec<Option<String>> {
    row.iter().map(|c| c.as_ref().map(|c| String::from_utf8_lossy(c).into_owned())).collect()
}

proptest! {
    #![proptest_config(proptest::test_runner::Config { cases: 64, failure_persistence: None, ..Default::default() })]

    #[test]
    fn merged_answers_are_those_of_one_database(
        rows in prop::collection::vec((0..12_i64, prop::option::of(0..3_i64), prop::option::of("[ab]{0,2}"), prop::option::of(-5..9_i64)), 0..30),
        others in prop::collection::vec((0..12_i64, -5..9_i64), 0..12),
    ) {
        let world = World::new(&rows, &others);
        for text in BAGS {
            let (merged, whole) = world.both(text);
            let sorted = |answer: &Answer| {
                let mut rows: Vec<_> = answer.rows.iter().map(|r| text_of(r)).collect();
                rows.sort();
                rows
            };
            prop_assert_eq!(sorted(&merged), sorted(&whole), "{}", text);
            let names = |a: &Answer| a.columns.iter().map(|c| c.name.clone()).collect::<Vec<_>>();
            prop_assert_eq!(names(&merged), names(&whole), "{}", text);
        }
        for text in LISTS {
            let (merged, whole) = world.both(text);
            let all = |a: &Answer| a.rows.iter().map(|r| text_of(r)).collect::<Vec<_>>();
            prop_assert_eq!(all(&merged), all(&whole), "{}", text);
        }
        // Averages: SQLite's are binary, ours decimal with four more digits.
        let (merged, whole) = world.both("SELECT g, avg(n) FROM t GROUP BY g ORDER BY g");
        for (ours, theirs) in merged.rows.iter().zip(&whole.rows) {
            let value = |row: &Vec<Cell>| row[1].as_ref().map(|c| String::from_utf8_lossy(c).parse::<f64>().unwrap());
            prop_assert_eq!(&ours[0], &theirs[0]);
            match (value(ours), value(theirs)) {
                (Some(ours), Some(theirs)) => prop_assert!((ours - theirs).abs() < 0.0001),
                (ours, theirs) => prop_assert_eq!(ours, theirs),
            }
        }
    }

    #[test]
    fn changes_reach_every_row_once(
        rows in prop::collection::vec((0..12_i64, prop::option::of(0..3_i64), prop::option::of("[ab]{0,2}"), prop::option::of(-5..9_i64)), 0..20),
    ) {
        let world = World::new(&rows, &[]);
        for text in [
            "UPDATE t SET n = n + 1 WHERE g = 1",
            "UPDATE t SET s = 'x' WHERE id IN (1, 5, 7)",
            "DELETE FROM t WHERE id BETWEEN 3 AND 5 OR n < 0",
            "INSERT INTO t (id, n) VALUES (1, 1), (2, 2), (3, 3), (4, 4)",
        ] {
            world.change(text);
            let (merged, whole) = world.both("SELECT * FROM t ORDER BY id, g, s, n");
            prop_assert_eq!(merged.rows, whole.rows, "{}", text);
        }
    }

    /// Constants and names come to a source as the client wrote them, whatever is in them.
    #[test]
    fn constants_and_names_are_the_same_at_every_source(
        constant in "[a;'\"`\\\\ -]{0,9}",
        name in "[a;'\"`\\\\ -]{1,9}",
        is_maria in any::<bool>(),
        is_other in any::<bool>(),
    ) {
        let (client, escaped) = (if is_maria { MARIA } else { PG }, constant.replace('\\', r"\\"));
        let escaped = escaped.replace('\'', r"\'");
        let (constant_of, name_of) = match (is_maria, is_other) {
            (true, true) => (format!("\"{}\"", escaped.replace('"', "\"\"")), format!("`{}`", name.replace('`', "``"))),
            (true, false) => (format!("'{escaped}'"), format!("'{}'", name.replace('\\', r"\\").replace('\'', "''"))),
            (false, true) => (format!("E'{escaped}'"), format!("\"{}\"", name.replace('"', "\"\""))),
            (false, false) => (format!("'{}'", constant.replace('\'', "''")), format!("\"{}\"", name.replace('"', "\"\""))),
        };
        for (table, quote) in [("audit WHERE id = 1", '`'), ("orders WHERE id = 1", '"')] {
            let text = format!("SELECT {constant_of} AS {name_of} FROM {table}");
            let told = texts(&text, client, RR).remove(0).1;
            prop_assert_eq!(in_quotes(&told, '\'', quote), std::slice::from_ref(&constant), "{}: {}", text, told);
            prop_assert_eq!(in_quotes(&told, quote, '\''), std::slice::from_ref(&name), "{}: {}", text, told);
        }
    }

    #[test]
    fn any_text_is_read_or_refused(text in "[a-zA-Z0-9 ;'\"`$/*#().,=<>-]{0,60}", is_maria in any::<bool>()) {
        let dialect = if is_maria { MARIA } else { PG };
        if let Ok(parsed) = parse(&text, dialect) {
            for one in parsed {
                if let Verb::Data(statement) = one.verb {
                    let _ = plan(&catalogue(), &statement, &[], &context(dialect, SER));
                }
            }
        }
    }
}

/// What is between these quotes in a text without escapes, outside of the other ones.
fn in_quotes(text: &str, quote: char, other: char) -> Vec<String> {
    let (mut found, mut chars) = (Vec::new(), text.chars().peekable());
    while let Some(c) = chars.next() {
        if c != quote && c != other {
            continue;
        }
        let mut inner = String::new();
        while let Some(next) = chars.next() {
            if next == c && chars.next_if_eq(&c).is_none() {
                break;
            }
            inner.push(next);
        }
        if c == quote {
            found.push(inner);
        }
    }
    found
}

#[test]
fn what_drivers_and_benchmarks_say_first_is_understood() {
    let verb = |text: &str, dialect| parse(text, dialect).map(|mut parsed| parsed.remove(0).verb);
    let form = CopyForm {
        is_csv: false,
        delimiter: b'\t',
        null: "\\N".into(),
        has_header: false,
        quote: b'"',
        escape: b'"',
    };
    let copy = |before: &[&str], columns: &[&str], form: &CopyForm| Verb::Copy {
        before: before.iter().map(|part| (*part).to_owned()).collect(),
        table: "pgbench_accounts".into(),
        columns: columns.iter().map(|column| (*column).to_owned()).collect(),
        form: form.clone(),
    };
    let postgres = Dialect::PostgreSql;
    let text = "copy pgbench_accounts from stdin with (freeze on)";
    assert_eq!(verb(text, postgres), Ok(copy(&[], &[], &form)));
    let text = "COPY public.\"pgbench_accounts\" (aid, \"bid\") FROM STDIN";
    assert_eq!(verb(text, postgres), Ok(copy(&["public"], &["aid", "bid"], &form)));
    let text = "COPY pgbench_accounts FROM stdin WITH DELIMITER AS '|' NULL AS E'\\\\N'";
    let other = CopyForm { delimiter: b'|', ..form.clone() };
    assert_eq!(verb(text, postgres), Ok(copy(&[], &[], &other)));
    let text =
        "COPY (SELECT a, 'x)' FROM t WHERE (b = 1)) TO STDOUT (FORMAT csv, HEADER, NULL '-')";
    let csv = CopyForm {
        is_csv: true,
        delimiter: b',',
        null: "-".into(),
        has_header: true,
        ..form.clone()
    };
    let Ok(Verb::CopyOut { query, form: found }) = verb(text, postgres) else { panic!("{text}") };
    assert_eq!(found, csv);
    assert!(matches!(verb(&query, postgres), Ok(Verb::Data(_))), "{query}");
    let text = "COPY \"T\" (a) TO STDOUT CSV";
    let Ok(Verb::CopyOut { query, .. }) = verb(text, postgres) else { panic!("{text}") };
    assert_eq!(query, "SELECT \"a\" FROM \"T\"");
    for (text, why) in [
        ("COPY t FROM STDIN (FORMAT binary)", "not binary"),
        ("COPY t FROM '/etc/passwd'", "files"),
        ("COPY t FROM STDIN (FORCE_NULL (a))", "force_null"),
        ("COPY t FROM STDIN DELIMITER 'ab'", "one-byte"),
        ("COPY t", "syntax error"),
    ] {
        let refused = verb(text, postgres).unwrap_err();
        assert!(refused.message.contains(why), "{text}: {refused}");
    }
}

/// What a text changes of the session, in short.
fn changes(text: &str, dialect: Dialect) -> Result<String, String> {
    let mut parsed = parse(text, dialect).map_err(|refusal| refusal.message)?;
    let (Verb::Set(changes) | Verb::Begin(changes)) = parsed.remove(0).verb else {
        return Err("it is something else".into());
    };
    fn written(term: &Term) -> String {
        match term {
            Term::Default => "DEFAULT".into(),
            Term::Text(text) => format!("'{text}'"),
            Term::Number(number) => number.clone(),
            Term::Variable { name, is_global } => {
                format!("@@{}{name}", if *is_global { "global." } else { "" })
            }
            Term::Concat(terms) => terms.iter().map(written).collect::<Vec<_>>().join("+"),
        }
    }
    let for_all = |is| if is { " for all" } else { "" };
    let one = |change: Change| match change {
        Change::Level { level, is_session } => {
            format!("{}{}", level.map_or("default", Isolation::name), for_all(is_session))
        }
        Change::ReadOnly { is, is_session } => {
            format!("READ {}{}", if is { "ONLY" } else { "WRITE" }, for_all(is_session))
        }
        Change::Autocommit(is) => format!("autocommit {is}"),
        Change::Setting { name, value, is_local } => {
            let value: Vec<String> = value.iter().map(written).collect();
            format!("{name} = {}{}", value.join(", "), if is_local { " local" } else { "" })
        }
    };
    Ok(changes.into_iter().map(one).collect::<Vec<_>>().join("; "))
}

#[test]
fn settings_of_drivers_and_frameworks_are_read() {
    for (text, means) in [
        ("SET client_encoding TO 'UTF8'", "client_encoding = 'UTF8'"),
        ("SET NAMES 'UTF8'", "client_encoding = 'UTF8'"),
        ("SET TIME ZONE 'Europe/Berlin'", "timezone = 'Europe/Berlin'"),
        ("SET TIME ZONE -7", "timezone = -7"),
        ("SET TIME ZONE INTERVAL '-08:00' HOUR TO MINUTE", "timezone = '<-08:00>+08:00'"),
        ("SET SESSION TIME ZONE LOCAL", "timezone = DEFAULT"),
        ("SET datestyle TO ISO, DMY", "datestyle = 'iso', 'dmy'"),
        ("SET LOCAL statement_timeout = 500", "statement_timeout = 500 local"),
        ("SET extra_float_digits = -3", "extra_float_digits = -3"),
        ("set search_path to \"My\", public", "search_path = 'My', 'public'"),
        ("SET application_name = DEFAULT", "application_name = DEFAULT"),
        ("SET myapp.user = 'a''b'", "myapp.user = 'a'b'"),
        (
            "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY",
            "REPEATABLE READ for all; READ ONLY for all",
        ),
        ("SET TRANSACTION READ WRITE NOT DEFERRABLE", "READ WRITE"),
        ("SET default_transaction_isolation TO 'read committed'", "READ COMMITTED for all"),
        ("SET default_transaction_read_only = on", "READ ONLY for all"),
        ("SET transaction_read_only TO off", "READ WRITE"),
        ("BEGIN", ""),
        ("begin isolation level serializable read only deferrable", "SERIALIZABLE; READ ONLY"),
        (
            "START TRANSACTION READ WRITE, ISOLATION LEVEL READ UNCOMMITTED",
            "READ WRITE; READ COMMITTED",
        ),
    ] {
        assert_eq!(changes(text, PG), Ok(means.to_owned()), "{text}");
    }
    for (text, means) in [
        (
            "SET NAMES utf8mb4 COLLATE utf8mb4_bin",
            "names = 'utf8mb4'; collation_connection = 'utf8mb4_bin'",
        ),
        ("SET autocommit=0", "autocommit false"),
        ("SET @@session.autocommit = OFF", "autocommit false"),
        (
            "set autocommit=1, session_track_schema=1, sql_mode = concat(@@sql_mode,',STRICT_TRANS_TABLES')",
            "autocommit true; session_track_schema = 1; sql_mode = @@sql_mode+',STRICT_TRANS_TABLES'",
        ),
        (
            "SET @@SESSION.sql_auto_is_null = 0, @@SESSION.wait_timeout = 2147483, NAMES utf8mb4",
            "sql_auto_is_null = 0; wait_timeout = 2147483; names = 'utf8mb4'",
        ),
        ("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED", "READ COMMITTED for all"),
        ("SET TRANSACTION READ ONLY", "READ ONLY"),
        ("SET SESSION tx_read_only = 1", "READ ONLY for all"),
        ("SET @@transaction_isolation = 'READ-COMMITTED'", "READ COMMITTED"),
        ("SET time_zone = @@global.time_zone", "time_zone = @@global.time_zone"),
        ("SET character_set_results = NULL", "character_set_results = 'NULL'"),
        ("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY", "READ ONLY"),
        ("BEGIN WORK", ""),
    ] {
        assert_eq!(changes(text, MARIA), Ok(means.to_owned()), "{text}");
    }
    for (text, dialect, why) in [
        ("SET ROLE admin", PG, "one user"),
        ("SET SESSION AUTHORIZATION bob", PG, "one user"),
        ("SET CONSTRAINTS ALL IMMEDIATE", PG, "CONSTRAINTS"),
        ("SET TRANSACTION SNAPSHOT '0001'", PG, "snapshot"),
        ("SET a", PG, "syntax error"),
        ("SET autocommit TO maybe", MARIA, "syntax error"),
        ("SET autocommit = maybe", MARIA, "Boolean"),
        ("SET @mine = 1", MARIA, "user variables"),
        ("SET GLOBAL sql_mode = ''", MARIA, "belong to the sources"),
        ("SET PASSWORD = 'x'", MARIA, "not supported"),
        ("BEGIN ISOLATION LEVEL SNAPSHOT", PG, "syntax error"),
    ] {
        let told = changes(text, dialect).expect_err(text);
        assert!(told.contains(why), "{text}: {told}");
    }
}

#[test]
fn set_config_is_a_set() {
    let found = |text: &str, values: &[Value]| {
        let Verb::Data(statement) = parse(text, PG).unwrap().remove(0).verb else {
            panic!("{text}")
        };
        let found = set::set_config(&statement, values)?;
        Ok::<_, Refusal>(found.map(|found| (found.if_known, found.items)))
    };
    let is = |change, value: &str| ConfigItem::Set(change, value.to_owned());
    let setting = |name: &str, value: &[&str], is_local| Change::Setting {
        name: name.into(),
        value: value.iter().map(|one| Term::Text((*one).into())).collect(),
        is_local,
    };
    let zone = [Value::Text("Europe/Berlin".into())];
    let told = found("SELECT set_config('TimeZone', $1, false)", &zone).unwrap().unwrap();
    let change = setting("timezone", &["Europe/Berlin"], false);
    assert_eq!(told, (false, vec![is(change, "Europe/Berlin")]));
    let text = "SELECT pg_catalog.set_config('search_path', 'a, \"B\"', true) AS x";
    let told = found(text, &[]).unwrap().unwrap();
    let change = setting("search_path", &["a", "B"], true);
    assert_eq!(told, (false, vec![is(change, "a, \"B\"")]));
    // asyncpg, and pg_dump.
    let text = "SELECT current_setting('jit') AS cur, set_config('jit', 'off', false) AS new";
    let told = found(text, &[]).unwrap().unwrap();
    let off = is(setting("jit", &["off"], false), "off");
    assert_eq!(told, (false, vec![ConfigItem::Current("jit".into()), off]));
    let text = "SELECT set_config(name, 'view', false) FROM pg_settings WHERE name = 'x'";
    let told = found(text, &[]).unwrap().unwrap();
    assert_eq!(told, (true, vec![is(setting("x", &["view"], false), "view")]));
    assert_eq!(found("SELECT current_setting('jit')", &[]), Ok(None));
    assert!(found("SELECT set_config('a', 'b', false), current_setting('a')", &[]).is_err());
    assert_eq!(found("SELECT 1", &[]), Ok(None));
    assert!(found("SELECT set_config(name, setting, false)", &[]).is_err());
}

/// Where concurrency is controlled record by record, a statement must name all that it reads or changes.
#[test]
fn statements_by_key_name_every_row() {
    let by_key = |text: &str, client| {
        let Verb::Data(statement) = parse(text, client).unwrap().remove(0).verb else {
            panic!("{text}: not read")
        };
        let context = Context { by_key: true, ..context(client, Isolation::ReadCommitted) };
        let plan = plan(&catalogue(), &statement, &[], &context);
        plan.map(|plan| plan.parts.iter().map(|part| part.records.len()).sum::<usize>())
    };
    for (text, records) in [
        ("SELECT balance FROM accounts WHERE id = 7", 1),
        ("SELECT balance FROM accounts WHERE id IN (7, 8, 2000) AND balance > 3", 3),
        ("UPDATE accounts SET balance = balance + 1 WHERE id = 7", 1),
        ("DELETE FROM accounts WHERE id = 7", 1),
        ("INSERT INTO accounts (id, balance) VALUES (1, 2), (3, 4)", 2),
    ] {
        assert_eq!(by_key(text, PG).unwrap_or_else(|e| panic!("{text}: {e}")), records, "{text}");
    }
    for (text, because) in [
        ("SELECT balance FROM accounts WHERE id < 7", "name each row"),
        ("SELECT balance FROM accounts", "name each row"),
        ("SELECT balance FROM accounts WHERE id = 7 OR balance = 3", "name each row"),
        ("SELECT balance FROM accounts WHERE id = 7 UNION SELECT 1", "name each row"),
        (
            "UPDATE accounts SET balance = (SELECT max(balance) FROM accounts WHERE id = 8) WHERE id = 7",
            "name each row",
        ),
        (
            "UPDATE accounts SET balance = random() WHERE id = 7",
            "random() would have another value",
        ),
        ("UPDATE accounts SET id = 8 WHERE id = 7", "cannot be changed"),
        // One row has several names: 7, '07', ' 7'.
        ("SELECT * FROM offices WHERE country = 'DE'", "name each row"),
        (
            "INSERT INTO accounts (id, balance) VALUES (5, (SELECT max(balance) FROM accounts))",
            "name each row",
        ),
        (
            "SELECT balance FROM accounts WHERE id = 7 ORDER BY 1 LIMIT (SELECT count(*) FROM accounts)",
            "name each row",
        ),
        ("INSERT INTO accounts (id, balance) VALUES (0, 1)", "name each row"),
        (
            "INSERT INTO accounts (id, balance) VALUES (7, 1) ON CONFLICT (owner) DO NOTHING",
            "ON CONFLICT",
        ),
        ("UPDATE accounts SET balance = utc_timestamp() WHERE id = 7", "another value"),
    ] {
        let refusal = by_key(text, PG).err().unwrap_or_else(|| panic!("{text}: planned"));
        assert!(refusal.message.contains(because), "{text}: {refusal}");
    }
}

/// Texts may have any quotes and backslashes, and stay one constant.
#[test]
fn no_text_ends_its_constant() {
    let evil = r"\', balance = 0 WHERE 1 = 1 -- ";
    for (value, constant) in [
        (evil, r"'\'', balance = 0 WHERE 1 = 1 -- '"),
        ("a''b", "'a''''b'"),
        (r"\''", r"'\'''''"),
        ("'", "''''"),
    ] {
        for (client, id) in [(PG, 7), (MARIA, 7), (PG, 8), (MARIA, 8), (PG, 9), (MARIA, 9)] {
            let text = format!("UPDATE accounts SET owner = $1 WHERE id = {id}");
            let text = if client == PG { text } else { text.replace("$1", "?") };
            let plan = planned(&text, client, RR, &[Value::Text(value.into())]).unwrap();
            assert!(plan.parts[0].text.contains(constant), "{value}: {}", plan.parts[0].text);
        }
    }
    for text in [
        "SELECT N'a''; DROP' FROM accounts WHERE id = 7",
        "SELECT X'a''; DROP' FROM accounts WHERE id = 7",
    ] {
        for client in [PG, MARIA] {
            let Ok(plan) = planned(text, client, RR, &[]) else { continue };
            assert!(plan.parts[0].text.contains("a''; DROP'"), "{}", plan.parts[0].text);
        }
    }
    // Nor does the least number end the proxy.
    let least = format!("SELECT * FROM accounts WHERE id = -'{}'", i128::MIN);
    let _ = planned(&least, PG, RR, &[]);
}

#[test]
fn bytes_are_the_same_bytes_at_every_source() {
    for (constant, at_maria) in
        [(r"'\x00ff5c27'::bytea", "X'00ff5c27'"), (r"CAST('a\\\377' AS bytea)", "X'615cff'")]
    {
        let mut seen = [false; 2];
        for id in 1..20 {
            let text = format!("UPDATE accounts SET owner = {constant} WHERE id = {id}");
            let plan = planned(&text, PG, RR, &[]).unwrap();
            let part = &plan.parts[0];
            let is_maria = catalogue().source(part.source).unwrap().kind == MARIA;
            seen[usize::from(is_maria)] = true;
            assert_eq!(part.text.contains(at_maria), is_maria, "{text}: {}", part.text);
        }
        assert_eq!(seen, [true; 2]);
    }
    let refusals = |client, value: &str, parameters: &[Value]| -> OrdSet<&'static str> {
        let text = |id| format!("UPDATE accounts SET owner = {value} WHERE id = {id}");
        let tried = (1..20).map(|id| planned(&text(id), client, RR, parameters));
        tried.filter_map(|planned| planned.err().map(|refusal| refusal.sqlstate)).collect()
    };
    assert_eq!(refusals(PG, r"'\x0'::bytea", &[]), ["22P02"].into());
    // PostgreSQL has no text with a zero in it.
    assert_eq!(refusals(MARIA, r"'a\0b'", &[]), ["22021"].into());
    assert_eq!(refusals(MARIA, "?", &[Value::Text("a\0b".into())]), ["22021"].into());
}

#[test]
fn a_statement_that_cannot_be_read_is_one_statement_at_its_source() {
    let of = |text: &str, dialect| unread(text, dialect).unwrap();
    for (given, text) in [
        (r"SHOW TABLES LIKE 'a\'; DROP TABLE t; -- '", "SHOW TABLES LIKE 'a''; DROP TABLE t; -- '"),
        (
            r#"SHOW x "it's \"\\" /* a ' */ `a\`, 'b''c', "d""e""#,
            r#"SHOW x 'it''s "\'   `a\`, 'b''c', 'd"e'"#,
        ),
        (r"SELECT '\n\%\_\q'", "SELECT '\n\\%\\_q'"),
        ("SELECT 5--1, a#b'\n, c", "SELECT 5--1, a \n, c"),
    ] {
        assert_eq!(of(given, Dialect::MariaDb).text, text, "{given}");
    }
    for (given, text) in [
        (r"SELECT a '\' -- '", r"SELECT a '\'  "),
        (r"SELECT E'a\'b' || name'\' /* /* */ ' */", r"SELECT E'a\'b' || name'\'  "),
        (r#"TABLE "a;\"$x$'$x$"#, r#"TABLE "a;\"$x$'$x$"#),
    ] {
        assert_eq!(of(given, Dialect::PostgreSql).text, text, "{given}");
    }
    let words =
        of("SELECT \"Pg_Advisory_Lock\"(1), 'get_lock', @@x, @y", Dialect::PostgreSql).words;
    assert_eq!(words, ["select", "pg_advisory_lock", "1", "@@x", "@y"]);
    let words = of("SELECT `get_lock`(1), \"x\", @y", Dialect::MariaDb).words;
    assert_eq!(words, ["select", "get_lock", "1", "@y"]);
}

#[test]
fn texts_are_cut_where_their_servers_cut_them() {
    let cut = |text: &str, dialect| {
        let pieces = parse(text, dialect).unwrap();
        pieces.into_iter().map(|piece| piece.text).collect::<Vec<_>>()
    };
    let (maria, postgres) = (Dialect::MariaDb, Dialect::PostgreSql);
    assert_eq!(cut("SELECT 5--1; SELECT 2", maria), ["SELECT 5--1", "SELECT 2"]);
    assert_eq!(cut("SELECT 5 -- 1; SELECT 2", maria), ["SELECT 5 -- 1; SELECT 2"]);
    assert_eq!(cut("SELECT 5--1; SELECT 2", postgres), ["SELECT 5--1; SELECT 2"]);
    assert_eq!(
        cut(r"SELECT name'\''; x'; SELECT 2", postgres),
        [r"SELECT name'\''; x'", "SELECT 2"]
    );
    assert_eq!(cut(r"SELECT e'\'; x'; SELECT 2", postgres), [r"SELECT e'\'; x'", "SELECT 2"]);
    assert_eq!(cut("SELECT a$b$; SELECT $b$;$b$", postgres), ["SELECT a$b$", "SELECT $b$;$b$"]);
    // Executable comments are what a server executes.
    assert_eq!(cut("/*!40101 SET NAMES utf8 */;", maria), ["SET NAMES utf8"]);
    assert_eq!(cut("SELECT 1 /*!50700 + 1 */ /*M! + 2 */", maria), ["SELECT 1     + 2"]);
    assert_eq!(cut("SELECT '/*! + 1 */'", maria), ["SELECT '/*! + 1 */'"]);
    assert_eq!(
        cut("SELECT 1 /*!40101 + 1 */; SELECT 2", postgres),
        ["SELECT 1 /*!40101 + 1 */", "SELECT 2"]
    );
}

#[test]
fn what_a_statement_does_to_its_session_is_known() {
    let of = |text: &str, dialect| match parse(text, dialect).unwrap().remove(0).verb {
        Verb::Data(statement) => effects(&statement),
        other => panic!("{text}: {other:?}"),
    };
    let (maria, postgres) = (Dialect::MariaDb, Dialect::PostgreSql);
    for (text, dialect, functions) in [
        ("SELECT pg_catalog.\"pg_advisory_lock\"(1)", postgres, &["pg_advisory_lock"][..]),
        (
            "SELECT * FROM accounts a, pg_try_advisory_lock(a.id)",
            postgres,
            &["pg_try_advisory_lock"],
        ),
        (
            "UPDATE accounts SET balance = GET_LOCK('a', 1) + last_insert_id()",
            maria,
            &["get_lock", "last_insert_id"],
        ),
        ("SELECT 'get_lock(1)', count(*) FROM accounts", maria, &[]),
        ("SELECT pg_advisory_unlock_all()", postgres, &[]),
    ] {
        assert_eq!(of(text, dialect).of_a_session, functions, "{text}");
    }
    for (text, variable) in [
        ("SELECT @Mine := 1", Some("@mine")),
        ("UPDATE accounts SET balance = @a WHERE id = 1", Some("@a")),
        ("SELECT @@sql_mode", None),
    ] {
        assert_eq!(of(text, maria).user_variable.as_deref(), variable, "{text}");
    }
    assert!(of("SELECT 1 AS one INTO TEMP mine", postgres).has_into);
    assert!(
        of("SELECT 1 FROM t WHERE a IN (SELECT 1 UNION SELECT b INTO x FROM y)", postgres).has_into
    );
    assert!(!of("INSERT INTO accounts SELECT * FROM accounts", postgres).has_into);
    for (text, calls_unknown) in [
        ("SELECT count(*), coalesce(sum(balance), 0) FROM accounts", false),
        ("SELECT current_setting('timezone'), now()", false),
        ("SELECT mine(1)", true),
        ("SELECT * FROM mine(1)", true),
        ("SELECT query_to_xml('SELECT 1', true, true, '')", true),
    ] {
        assert_eq!(of(text, postgres).calls_unknown, calls_unknown, "{text}");
    }
    assert!(set::KNOWN.is_sorted(), "they are looked for by name");
}

#[test]
fn patterns_have_a_backslash_for_their_escape() {
    for (text, client, told) in [
        ("SELECT id FROM audit WHERE owner LIKE 'a%'", PG, "LIKE 'a%'"),
        ("SELECT id FROM audit WHERE owner LIKE 'a\\_%'", PG, "LIKE 'a\\_%' ESCAPE '\\'"),
        (
            "SELECT id FROM audit WHERE owner NOT LIKE 'a\\_%'",
            MARIA,
            "NOT LIKE 'a\\_%' ESCAPE '\\'",
        ),
        (
            "SELECT id FROM audit WHERE owner LIKE concat('a', n)",
            MARIA,
            "LIKE concat('a', n) ESCAPE '\\'",
        ),
        ("SELECT id FROM audit WHERE owner LIKE 'a!_' ESCAPE '!'", MARIA, "LIKE 'a!_' ESCAPE '!'"),
    ] {
        let at_maria = texts(text, client, RR).remove(0).1;
        assert!(at_maria.ends_with(told), "{text}: {at_maria}");
    }
}

#[test]
fn no_name_ends_its_quotes() {
    let told = |text: &str, client| texts(text, client, RR).remove(0).1;
    for (given, client, at_maria) in [
        (r"SELECT id 'it''s' FROM audit", MARIA, "SELECT id AS `it's` FROM audit"),
        (r"SELECT id 'x\\'', 1; -- ' FROM audit", MARIA, r"SELECT id AS `x\', 1; -- ` FROM audit"),
        (r#"SELECT id AS "a`b" FROM audit"#, MARIA, "SELECT id AS `a``b` FROM audit"),
        (r"SELECT id AS `a\``b` FROM audit", MARIA, r"SELECT id AS `a\``b` FROM audit"),
        (r#"SELECT id AS "a\""b`" FROM audit"#, PG, r#"SELECT id AS `a\"b``` FROM audit"#),
    ] {
        assert_eq!(told(given, client), at_maria, "{given}");
    }
    let given = r#"SELECT t AS `a\``b"` FROM orders WHERE id = 1"#;
    assert_eq!(told(given, MARIA), r#"SELECT t AS "a\`b""" FROM orders WHERE id = 1"#);
    let given = r#"SELECT t AS "a\""b" FROM orders WHERE id = 1"#;
    assert_eq!(told(given, PG), given);
    // PostgreSQL's constants of a type are no names.
    let parsed = parse(r"SELECT name'\''; x'", PG).unwrap().remove(0);
    assert_eq!(parsed.verb, Verb::Other);
}

/// What a MariaDB source is told of a PostgreSQL client's statement about `audit`, whose columns are these.
fn typed(text: &str, parameters: &[Value]) -> Result<String, String> {
    let catalogue = catalogue();
    let parsed = parse(text, PG).unwrap().remove(0);
    let Verb::Data(statement) = &parsed.verb else { panic!("{text}") };
    let mut context = context(PG, RR);
    for table in tables_to_know(&catalogue, PG, statement, parameters) {
        let columns = [
            ("id", Kind::Int4),
            ("data", Kind::Bytes),
            ("is_open", Kind::Int2),
            ("note", Kind::Text),
        ];
        let columns = columns.map(|(name, kind)| (name.to_owned(), kind));
        context.kinds.insert(table, columns.to_vec());
    }
    let plan = plan(&catalogue, statement, parameters, &context);
    plan.map(|plan| plan.parts[0].text.clone()).map_err(|refusal| refusal.sqlstate.to_owned())
}

#[test]
fn constants_without_a_type_have_the_type_of_their_column() {
    let text = |text: &str| vec![Value::Text(text.to_owned())];
    for (statement, parameters, told) in [
        (
            r"INSERT INTO audit VALUES (1, '\xdead', 't', '\xdead')",
            vec![],
            r"INSERT INTO audit VALUES (1, X'dead', true, '\xdead')",
        ),
        (
            r"INSERT INTO audit (note, data, is_open) VALUES ('yes', $1, 'off'), ('n', 'a\\b', '1')",
            text(r"\x00ff"),
            r"INSERT INTO audit (note, data, is_open) VALUES ('yes', X'00ff', false), ('n', X'615c62', '1')",
        ),
        (
            r"UPDATE audit SET data = $1, note = '\x61', is_open = 'TRUE' WHERE data = E'\\x61'",
            text(r"\xBEEF"),
            r"UPDATE audit SET data = X'BEEF', note = '\x61', is_open = true WHERE data = X'61'",
        ),
        (
            r"SELECT id FROM audit a WHERE a.is_open = 'f' AND data IN ('\x01', 'b') AND note <> 'f'",
            vec![],
            r"SELECT id FROM audit a WHERE a.is_open = false AND data IN (X'01', 'b') AND note <> 'f'",
        ),
        (
            "DELETE FROM audit WHERE ('no') <> is_open OR note = $1",
            text("no"),
            "DELETE FROM audit WHERE ('no') <> is_open OR note = 'no'",
        ),
        (
            "DELETE FROM audit WHERE $1 <> is_open",
            text("no"),
            "DELETE FROM audit WHERE false <> is_open",
        ),
    ] {
        let found = typed(statement, &parameters).unwrap_or_else(|e| panic!("{statement}: {e}"));
        assert_eq!(found, told);
    }
    assert_eq!(typed(r"INSERT INTO audit (data) VALUES ('\xq')", &[]), Err("22P02".into()));
    let beside = [Value::Text("false".into()), Value::Bytes(vec![1])];
    let told = typed("INSERT INTO audit (is_open, data) VALUES ($1, $2)", &beside);
    assert_eq!(told.as_deref(), Ok("INSERT INTO audit (is_open, data) VALUES (false, X'01')"));
    // Other statements need not wait for anything to be known.
    let catalogue = catalogue();
    for (text, is_wanted) in [
        ("SELECT * FROM audit WHERE note = 'abc'", false),
        ("SELECT * FROM audit WHERE note = 'true'", true),
        (r"SELECT * FROM audit WHERE note = 'a\b'", true),
        ("SELECT * FROM audit WHERE note = '1'", false),
    ] {
        let Verb::Data(statement) = parse(text, PG).unwrap().remove(0).verb else {
            panic!("{text}")
        };
        let tables = tables_to_know(&catalogue, PG, &statement, &[]);
        assert_eq!(tables, if is_wanted { vec!["audit"] } else { vec![] }, "{text}");
    }
}

/// PostgreSQL gives a cast the name of its column, and ORDER BY means that result.
#[test]
fn an_order_may_name_a_column_that_is_cast() {
    for text in [
        "SELECT id::text FROM accounts ORDER BY id",
        "SELECT CAST(accounts.id AS text) FROM accounts ORDER BY id",
    ] {
        let plan = planned(text, PG, RR, &[]).unwrap();
        let answer = |cells: [&str; 2]| Answer {
            columns: vec![Column { name: "id".into(), kind: Kind::Text, oid: 0 }],
            rows: cells.iter().map(|cell| vec![Some(cell.as_bytes().to_vec())]).collect(),
            ..Answer::default()
        };
        let merged = merge(&plan.merge, vec![answer(["10", "9"]), answer(["2", "30"])]).unwrap();
        let cells: Vec<_> =
            merged.rows.iter().map(|row| text_of(row)[0].clone().unwrap()).collect();
        assert_eq!(cells, ["10", "2", "30", "9"], "{text}");
    }
}

#[test]
fn truth_of_both_kinds_of_sources_is_one_type() {
    let answer = |kind, cells: &[&str]| Answer {
        columns: vec![Column { name: "is".into(), kind, oid: 0 }],
        rows: cells.iter().map(|cell| vec![Some(cell.as_bytes().to_vec())]).collect(),
        ..Answer::default()
    };
    for first in [0, 1] {
        let mut answers =
            vec![answer(Kind::Bool, &["f", "t"]), answer(Kind::Int4, &["0", "1", "1"])];
        answers.rotate_left(first);
        let plan = planned("SELECT balance > 5 AS is FROM accounts ORDER BY is", PG, RR, &[]);
        let merged = merge(&plan.unwrap().merge, answers).unwrap();
        assert_eq!(merged.columns[0].kind, Kind::Bool);
        let cells: Vec<_> =
            merged.rows.iter().map(|row| text_of(row)[0].clone().unwrap()).collect();
        assert_eq!(cells, ["f", "f", "t", "t", "t"]);
    }
}

#[test]
fn what_only_mysql_s_clients_say_is_understood_at_every_source() {
    for (text, postgres, maria) in [
        (
            "SELECT balance FROM orders WHERE id = {} LOCK IN SHARE MODE",
            "SELECT balance FROM orders WHERE id = 1 FOR SHARE",
            "SELECT balance FROM orders WHERE id = 101 LOCK IN SHARE MODE",
        ),
        (
            "SELECT balance FROM orders WHERE id = {} LIMIT 1,2",
            "SELECT balance FROM orders WHERE id = 1 LIMIT 2 OFFSET 1",
            "SELECT balance FROM orders WHERE id = 101 LIMIT 1, 2",
        ),
        (
            "SELECT `lock` IN (1) FROM orders WHERE id = {}",
            "SELECT \"lock\" IN (1) FROM orders WHERE id = 1",
            "SELECT `lock` IN (1) FROM orders WHERE id = 101",
        ),
    ] {
        assert_eq!(texts(&text.replace("{}", "1"), MARIA, RR), [(0, postgres.to_owned())]);
        assert_eq!(texts(&text.replace("{}", "101"), MARIA, RR), [(1, maria.to_owned())]);
    }
}

#[test]
fn nulls_stand_where_the_client_expects_them() {
    let text = |text: &str, client| texts(text, client, RR).remove(0).1;
    for (written, at_mariadb) in [
        // A position is that of a column of the list.
        ("SELECT g FROM audit ORDER BY 1", "SELECT g FROM audit ORDER BY g IS NULL, 1"),
        (
            "SELECT id, g + 1 FROM audit ORDER BY 2 DESC, 1 LIMIT 3",
            "SELECT id, g + 1 FROM audit ORDER BY (g + 1) IS NULL DESC, 2 DESC, id IS NULL, 1 LIMIT 3",
        ),
        ("SELECT g FROM audit ORDER BY 1 NULLS FIRST", "SELECT g FROM audit ORDER BY 1"),
        (
            "SELECT v FROM (SELECT g AS v FROM audit ORDER BY 1 LIMIT 2) AS x",
            "SELECT v FROM (SELECT g AS v FROM audit ORDER BY g IS NULL, 1 LIMIT 2) AS x",
        ),
        // In an expression MariaDB takes a name for the table's column, and knows no aggregate by
        // its alias.
        (
            "SELECT nullif(g, 1) AS g FROM audit ORDER BY g",
            "SELECT nullif(g, 1) AS g FROM audit ORDER BY nullif(g, 1) IS NULL, g",
        ),
        (
            "SELECT g, max(id) AS m FROM audit GROUP BY g ORDER BY m",
            "SELECT g, max(id) AS m FROM audit GROUP BY g ORDER BY max(id) IS NULL, m",
        ),
        (
            "SELECT DISTINCT g FROM audit ORDER BY g DESC",
            "SELECT DISTINCT g FROM audit ORDER BY g IS NULL DESC, g DESC",
        ),
        (
            "SELECT audit.g FROM audit UNION ALL SELECT 7 ORDER BY 1",
            "SELECT audit.g FROM audit UNION ALL SELECT 7 ORDER BY g IS NULL, 1",
        ),
        (
            "SELECT g + 1 FROM audit UNION ALL SELECT 7 ORDER BY 1",
            "SELECT g + 1 AS `g + 1` FROM audit UNION ALL SELECT 7 ORDER BY `g + 1` IS NULL, 1",
        ),
        (
            "SELECT sum(id) OVER (PARTITION BY t ORDER BY g DESC) FROM audit",
            "SELECT sum(id) OVER (PARTITION BY t ORDER BY g IS NULL DESC, g DESC) FROM audit",
        ),
        (
            "SELECT sum(id) OVER w FROM audit WINDOW w AS (ORDER BY g)",
            "SELECT sum(id) OVER w FROM audit WINDOW w AS (ORDER BY g IS NULL, g)",
        ),
    ] {
        assert_eq!(text(written, PG), at_mariadb);
    }
    for (written, at_postgresql) in [
        (
            "SELECT sum(n) OVER (ORDER BY g) FROM orders WHERE id = 1",
            "SELECT sum(n) OVER (ORDER BY g NULLS FIRST) FROM orders WHERE id = 1",
        ),
        (
            "SELECT DISTINCT g FROM orders WHERE id = 1 ORDER BY 1 DESC",
            "SELECT DISTINCT g FROM orders WHERE id = 1 ORDER BY 1 DESC NULLS LAST",
        ),
        (
            "SELECT g FROM orders WHERE id = 1 UNION SELECT 7 ORDER BY g",
            "SELECT g FROM orders WHERE id = 1 UNION SELECT 7 ORDER BY g NULLS FIRST",
        ),
    ] {
        assert_eq!(text(written, MARIA), at_postgresql);
    }
    // The columns of `accounts` are in the file, and those of `audit` are not known.
    let of_all = texts("SELECT * FROM accounts ORDER BY 2", PG, RR);
    assert_eq!(of_all[1].1, "SELECT * FROM accounts ORDER BY `owner` IS NULL, 2");
    refused("SELECT * FROM audit ORDER BY 1", PG, RR, "write the column's name");
    let range =
        "SELECT sum(g) OVER (ORDER BY g RANGE BETWEEN 1 PRECEDING AND CURRENT ROW) FROM audit";
    refused(range, PG, RR, "distance in RANGE");
}

#[test]
fn words_that_only_the_source_reserves_are_quoted() {
    let text = |text: &str, client| texts(text, client, RR).remove(0).1;
    assert_eq!(
        text("SELECT key, a.Rank, left(t, 2), mod(id, 2) AS condition FROM audit AS a", PG),
        "SELECT `key`, a.`rank`, left(t, 2), mod(id, 2) AS `condition` FROM audit AS a"
    );
    assert_eq!(
        text("SELECT User, user(), n FROM orders WHERE id = 1 AND end > 2", MARIA),
        "SELECT \"user\", user(), n FROM orders WHERE id = 1 AND \"end\" > 2"
    );
    // A source of the client's kind gets them as they are.
    assert_eq!(
        text("SELECT key FROM orders WHERE id = 1", PG),
        "SELECT key FROM orders WHERE id = 1"
    );
}

#[test]
fn locks_stand_where_postgresql_accepts_them() {
    let plan = |text: &str| planned(text, PG, SER, &[]).unwrap().parts.remove(0);
    let set = plan("(SELECT n FROM orders WHERE id = 1) UNION (SELECT 2)");
    assert_eq!(set.text, "(SELECT n FROM orders WHERE id = 1) UNION (SELECT 2)");
    let locked =
        "SELECT count(*) FROM (SELECT 1 FROM orders WHERE id = 1 FOR SHARE) AS orthodrome_locked";
    assert_eq!(set.prelude, [locked]);
    let nested = plan(
        "((SELECT n FROM orders WHERE id = 1) UNION (SELECT m FROM orders WHERE id = 1)) EXCEPT (SELECT 2)",
    );
    assert_eq!(nested.prelude.len(), 2);
    assert!(
        !nested.text.contains("SHARE") && !nested.text.contains("orthodrome"),
        "{}",
        nested.text
    );
    let rows = plan("SELECT unnest(a) FROM orders WHERE id = 1");
    assert_eq!(rows.text, "SELECT unnest(a) FROM orders WHERE id = 1");
    assert_eq!(rows.prelude, [locked]);
    // Parentheses around the whole query change nothing.
    let whole = plan("(SELECT n FROM orders WHERE id = 1)");
    assert_eq!(whole.text, "(SELECT n FROM orders WHERE id = 1 FOR SHARE)");
}

#[test]
fn binary_has_one_operand() {
    let text = |text: &str| texts(&format!("SELECT {text} FROM audit"), MARIA, RR).remove(0).1;
    for (written, sent) in [
        ("BINARY x = y", "CAST(x AS BINARY) = y"),
        ("a, binary t.x LIKE 'b', 1", "a, CAST(t.x AS BINARY) LIKE 'b', 1"),
        ("x = BINARY concat(a, b) AND c", "x = CAST(concat(a, b) AS BINARY) AND c"),
        ("BINARY (a + 1) * 2", "CAST((a + 1) AS BINARY) * 2"),
        ("BINARY 'a' = BINARY 'A'", "CAST('a' AS BINARY) = CAST('A' AS BINARY)"),
        ("CAST(x AS BINARY) = y", "CAST(x AS BINARY) = y"),
    ] {
        assert_eq!(text(written), format!("SELECT {sent} FROM audit"));
    }
}

#[test]
fn times_of_both_kinds_of_sources_are_equal() {
    let answer = |oid, kind, cells: &[&str]| Answer {
        columns: vec![
            Column { name: "ts".into(), kind, oid },
            Column { name: "count".into(), kind: Kind::Int8, oid: if oid == 0 { 0 } else { 20 } },
        ],
        rows: cells
            .iter()
            .map(|cell| vec![Some(cell.as_bytes().to_vec()), Some(b"1".to_vec())])
            .collect(),
        ..Answer::default()
    };
    let plan = planned("SELECT ts, count(*) FROM orders GROUP BY ts ORDER BY ts", PG, RR, &[]);
    let plan = plan.unwrap();
    for (oid, kind, zone) in [(1114, Kind::Timestamp, ""), (1184, Kind::TimestampTz, "+00")] {
        let time = |text: &str| format!("{text}{zone}");
        let of_postgresql =
            answer(oid, kind, &[&time("2024-01-01 00:00:00"), &time("2024-01-01 00:00:00.5")]);
        let of_mariadb = answer(
            0,
            Kind::Timestamp,
            &[
                "2024-01-01 00:00:00.000000",
                "2024-01-01 00:00:00.500000",
                "2024-01-01 00:00:10.000000",
            ],
        );
        let merged = merge(&plan.merge, vec![of_postgresql, of_mariadb]).unwrap();
        let rows: Vec<Vec<_>> = merged.rows.iter().map(|row| text_of(row)).collect();
        let row = |time: &str, count: &str| vec![Some(time.to_owned()), Some(count.to_owned())];
        assert_eq!(
            rows,
            [
                row("2024-01-01 00:00:00", "2"),
                row("2024-01-01 00:00:00.5", "2"),
                row("2024-01-01 00:00:10", "1")
            ]
        );
    }
}

#[test]
fn values_that_only_their_source_can_order_are_not_merged_in_order() {
    let answer = |cells: &[&str]| Answer {
        columns: vec![Column { name: "mood".into(), kind: Kind::Other, oid: 16_400 }],
        rows: cells.iter().map(|cell| vec![Some(cell.as_bytes().to_vec())]).collect(),
        ..Answer::default()
    };
    let merged = |text: &str, answers: Vec<Answer>| {
        merge(&planned(text, PG, RR, &[]).unwrap().merge, answers)
    };
    for text in [
        "SELECT max(mood) FROM orders",
        "SELECT mood FROM orders ORDER BY mood LIMIT 2",
        "SELECT mood FROM orders GROUP BY mood ORDER BY mood",
    ] {
        let refused = merged(text, vec![answer(&["sad"]), answer(&["happy"])]).unwrap_err();
        assert_eq!(refused.sqlstate, "0A000", "{text}");
        assert!(refused.message.contains("column \"mood\""), "{text}: {refused}");
        // Its source has put them in order.
        assert!(merged(text, vec![answer(&["sad"])]).is_ok(), "{text}");
    }
    let grouped =
        merged("SELECT mood FROM orders GROUP BY mood", vec![answer(&["sad"]), answer(&["sad"])]);
    assert_eq!(grouped.unwrap().rows.len(), 1);
}

#[test]
fn elements_of_an_array_of_booleans_are_booleans_at_mariadb() {
    let array = Value::Text("{t,f}".into());
    let text = "SELECT id FROM audit WHERE b = ANY($1)";
    let Verb::Data(statement) = parse(text, PG).unwrap().remove(0).verb else { panic!("{text}") };
    assert_eq!(
        tables_to_know(&catalogue(), PG, &statement, std::slice::from_ref(&array)),
        ["audit"]
    );
    let kinds = Kinds::from([("audit".to_owned(), vec![("b".to_owned(), Kind::Int2)])]);
    let context = Context { kinds, ..context(PG, RR) };
    let planned = plan(&catalogue(), &statement, &[array], &context).unwrap();
    assert_eq!(planned.parts[0].text, "SELECT id FROM audit WHERE b IN (true, false)");
}

/// The texts for each source of a statement, if the columns of `accounts` are known.
fn with_kinds(text: &str, client: Dialect) -> Vec<String> {
    let kinds = [("id", Kind::Int4), ("owner", Kind::Text), ("balance", Kind::Decimal)];
    let kinds = kinds.map(|(name, kind)| (name.to_owned(), kind)).to_vec();
    let kinds = Kinds::from([("accounts".to_owned(), kinds)]);
    let collations = [(SourceId(0), "C.utf8".to_owned())].into();
    let context = Context { kinds, collations, ..context(client, RR) };
    let (Verb::Data(statement) | Verb::Schema(statement)) =
        parse(text, client).unwrap().remove(0).verb
    else {
        panic!("{text}")
    };
    let plan = plan(&catalogue(), &statement, &[], &context).unwrap_or_else(|e| panic!("{e}"));
    plan.parts.into_iter().map(|part| part.text).collect()
}

#[test]
fn texts_of_several_sources_are_ordered_byte_by_byte() {
    let maria = "CONVERT(owner USING utf8mb4) COLLATE utf8mb4_nopad_bin";
    for (text, of_pg, of_maria) in [
        (
            "SELECT min(owner), max(id) FROM accounts",
            r#"SELECT min(owner COLLATE "C"), max(id) FROM accounts"#.to_owned(),
            format!("SELECT min({maria}), max(id) FROM accounts"),
        ),
        (
            "SELECT id, owner AS o FROM accounts ORDER BY o DESC, id LIMIT 1",
            r#"SELECT id, owner AS o FROM accounts ORDER BY owner COLLATE "C" DESC, id LIMIT 1"#
                .to_owned(),
            format!(
                "SELECT id, owner AS o FROM accounts ORDER BY ({maria}) IS NULL DESC, {maria} DESC, id IS NULL, id LIMIT 1"
            ),
        ),
    ] {
        let told = with_kinds(text, PG);
        assert_eq!(told[0], of_pg);
        assert_eq!(told[1], of_maria);
    }
    // One source orders as it likes.
    let told = with_kinds("SELECT id FROM accounts WHERE id = 1 ORDER BY owner", PG);
    assert!(!told[0].contains("COLLATE"), "{told:?}");
    let statement = |text: &str| match parse(text, PG).unwrap().remove(0).verb {
        Verb::Data(statement) => statement,
        _ => panic!("{text}"),
    };
    let wanted = |text: &str| tables_to_order(&catalogue(), &statement(text));
    assert_eq!(wanted("SELECT id FROM accounts ORDER BY owner"), ["accounts"]);
    assert_eq!(wanted("SELECT max(owner) FROM accounts"), ["accounts"]);
    assert!(wanted("SELECT owner FROM accounts").is_empty());
    assert!(wanted("SELECT id FROM audit ORDER BY id").is_empty(), "it is at one source");
}

#[test]
fn tables_at_both_kinds_of_sources_compare_texts_byte_by_byte() {
    let create = "CREATE TABLE accounts (id INT PRIMARY KEY, owner VARCHAR(20), balance INT)";
    for client in [PG, MARIA] {
        let told = with_kinds(create, client);
        assert!(told[0].contains(r#"owner VARCHAR(20) COLLATE "C.utf8","#), "{}", told[0]);
        assert!(told[1].replace(' ', "").ends_with(")COLLATE=utf8mb4_nopad_bin"), "{}", told[1]);
    }
    let told = with_kinds("CREATE TABLE audit (note TEXT)", MARIA);
    assert!(!told[0].contains("COLLATE"), "MariaDB's own way: {}", told[0]);
    let told = with_kinds("CREATE TABLE audit (note TEXT, isOpen BOOL, \"isShut\" BOOL)", PG);
    assert!(told[0].contains("COLLATE"), "{}", told[0]);
    assert!(told[0].contains("isopen BOOLEAN") && told[0].contains("`isShut`"), "{}", told[0]);
}

#[test]
fn constants_of_mysql_s_clients_have_the_type_of_their_column_at_postgresql() {
    let kinds = [("id", Kind::Int4), ("data", Kind::Bytes), ("flag", Kind::Int2)];
    let kinds = kinds.map(|(name, kind)| (name.to_owned(), kind)).to_vec();
    let mut context = context(MARIA, RR);
    for (text, told) in [
        (
            r#"INSERT INTO currencies (id, data, flag) VALUES (1, '\\x41', true), (2, "a\\b", 0)"#,
            r"INSERT INTO currencies (id, data, flag) VALUES (1, CAST('\x5c783431' AS BYTEA), 1), (2, CAST('\x615c62' AS BYTEA), 0)",
        ),
        (
            r"UPDATE currencies SET flag = false WHERE data = '\\x43' AND id = 1",
            r"UPDATE currencies SET flag = 0 WHERE data = CAST('\x5c783433' AS BYTEA) AND id = 1",
        ),
    ] {
        let Verb::Data(statement) = parse(text, MARIA).unwrap().remove(0).verb else {
            panic!("{text}")
        };
        assert_eq!(tables_to_know(&catalogue(), MARIA, &statement, &[]), ["currencies"]);
        context.kinds = Kinds::from([("currencies".to_owned(), kinds.clone())]);
        let plan = plan(&catalogue(), &statement, &[], &context).unwrap();
        assert_eq!(plan.parts[0].text, told);
    }
}

#[test]
fn names_of_columns_are_known_outside_of_a_subquery() {
    for (text, told) in [
        (
            "SELECT count FROM (SELECT count(*), max(id) AS m FROM audit) x",
            "SELECT count FROM (SELECT count(*) AS `count`, max(id) AS m FROM audit) x",
        ),
        (
            "WITH x AS (SELECT lower(note) FROM audit) SELECT lower FROM x",
            "WITH x AS (SELECT lower(note) AS `lower` FROM audit) SELECT lower FROM x",
        ),
    ] {
        let plan = planned(text, PG, RR, &[]).unwrap();
        assert_eq!(plan.parts[0].text, told);
    }
    let plan =
        planned("SELECT note, count(*) FROM audit GROUP BY note ORDER BY count", PG, RR, &[]);
    let text = plan.unwrap().parts.remove(0).text;
    assert!(text.starts_with("SELECT note, count(*) AS `count` FROM audit"), "{text}");
}

#[test]
fn documents_and_uuids_of_both_kinds_of_sources_keep_their_type() {
    let answer = |kind, oid| Answer {
        columns: vec![Column { name: "j".into(), kind, oid }],
        rows: vec![vec![Some(b"{}".to_vec())]],
        ..Answer::default()
    };
    let plan = planned("SELECT j FROM accounts", PG, RR, &[]).unwrap();
    for (kind, oid) in [(Kind::Json, 3802), (Kind::Uuid, 2950)] {
        let answers = [answer(Kind::Text, 0), answer(kind, oid), answer(Kind::Text, 0)];
        let merged = merge(&plan.merge, answers.to_vec()).unwrap();
        assert_eq!((merged.columns[0].kind, merged.columns[0].oid), (kind, oid));
    }
}

#[test]
fn times_of_postgresql_s_drivers_have_no_zone_at_mariadb() {
    let kinds = [("id", Kind::Int4), ("at", Kind::Timestamp), ("day", Kind::Date)];
    let kinds = kinds.map(|(name, kind)| (name.to_owned(), kind)).to_vec();
    let told = |text: &str, parameters: &[Value]| {
        let Verb::Data(statement) = parse(text, PG).unwrap().remove(0).verb else {
            panic!("{text}")
        };
        let known = tables_to_know(&catalogue(), PG, &statement, parameters);
        let kinds = known.into_iter().map(|table| (table, kinds.clone())).collect();
        let context = Context { kinds, ..context(PG, RR) };
        plan(&catalogue(), &statement, parameters, &context).unwrap().parts.remove(0).text
    };
    let insert = "INSERT INTO audit (id, at, day) VALUES (1, $1, $2)";
    for (at, day, values) in [
        (
            "2024-01-01T01:02:03.045+00:00",
            "2024-02-01 +00",
            "'2024-01-01 01:02:03.045', '2024-02-01'",
        ),
        ("2024-01-01 01:02:03.456+0530", "2024-02-01", "'2024-01-01 01:02:03.456', '2024-02-01'"),
        ("2024-01-01T01:02:03Z", "2024-02-01Z", "'2024-01-01 01:02:03', '2024-02-01'"),
        ("2024-01-01 01:02", "now", "'2024-01-01 01:02', 'now'"),
        ("2024-01-01T", "2024-01-011", "'2024-01-01T', '2024-01-011'"),
    ] {
        let parameters = [Value::Text(at.to_owned()), Value::Text(day.to_owned())];
        let expected = format!("INSERT INTO audit (id, at, day) VALUES (1, {values})");
        assert_eq!(told(insert, &parameters), expected);
    }
    // A text stays what it is.
    let text =
        "SELECT id FROM audit WHERE note = '2024-01-01T01:02:03Z' AND at > '2024-01-01T01:02:03Z'";
    assert_eq!(
        told(text, &[]),
        "SELECT id FROM audit WHERE note = '2024-01-01T01:02:03Z' AND at > '2024-01-01 01:02:03'"
    );
}

#[test]
fn weak_locks_and_patterns_without_escapes_are_read() {
    for (text, told) in [
        ("SELECT id FROM audit WHERE id = 1 FOR NO KEY UPDATE", "FOR UPDATE"),
        ("SELECT id FROM audit WHERE id = 1 FOR KEY SHARE", "LOCK IN SHARE MODE"),
        ("SELECT id FROM audit WHERE note LIKE 'a\\%' ESCAPE ''", r"note LIKE 'a\%'"),
    ] {
        let plan = planned(text, PG, RR, &[]).unwrap_or_else(|e| panic!("{text}: {e}"));
        assert!(plan.parts[0].text.ends_with(told), "{}", plan.parts[0].text);
    }
}

#[test]
fn columns_that_are_added_are_treated_alike_at_both_kinds_of_sources() {
    for client in [PG, MARIA] {
        for kind in ["varchar(20)", "text", "char(3)"] {
            let told = with_kinds(&format!("ALTER TABLE accounts ADD COLUMN s {kind}"), client);
            assert!(told[0].ends_with(r#" COLLATE "C.utf8""#), "{}", told[0]);
            assert!(told[1].ends_with(" COLLATE utf8mb4_nopad_bin"), "{}", told[1]);
        }
        let told = with_kinds("ALTER TABLE accounts ADD COLUMN n INT", client);
        assert!(!told.concat().contains("COLLATE"), "{told:?}");
    }
    let told = with_kinds("ALTER TABLE audit ADD COLUMN s TEXT", MARIA);
    assert!(!told[0].contains("COLLATE"), "MariaDB's own way: {}", told[0]);
}

#[test]
fn types_that_only_one_kind_of_source_pads_or_rounds_are_replaced() {
    let create =
        "CREATE TABLE accounts (id INT PRIMARY KEY, owner CHAR(5), c CHAR, balance FLOAT4)";
    let told = with_kinds(create, PG);
    assert!(told[0].contains("owner VARCHAR(5) COLLATE"), "{}", told[0]);
    assert!(told[0].contains("c VARCHAR(1) COLLATE"), "{}", told[0]);
    assert!(told[0].contains("balance DOUBLE PRECISION"), "{}", told[0]);
    assert!(told[1].contains("owner VARCHAR(5),"), "{}", told[1]);
    assert!(told[1].contains("balance DOUBLE)"), "{}", told[1]);
    let told =
        with_kinds("CREATE TABLE accounts (id INT PRIMARY KEY, owner CHAR(5), f FLOAT)", MARIA);
    assert!(told[0].contains("owner VARCHAR(5) COLLATE"), "{}", told[0]);
    assert!(told[0].contains("f DOUBLE PRECISION)"), "{}", told[0]);
    assert!(told[1].contains("owner VARCHAR(5)") && told[1].contains("f DOUBLE)"), "{}", told[1]);
}

/// What a PostgreSQL source is told of a MySQL client's statement about `currencies`.
fn bytes_told(text: &str, parameters: &[Value]) -> Result<String, &'static str> {
    let kinds = [("id", Kind::Int4), ("data", Kind::Bytes), ("s", Kind::Text), ("n", Kind::Int4)];
    let kinds = kinds.map(|(name, kind)| (name.to_owned(), kind)).to_vec();
    let Verb::Data(statement) = parse(text, MARIA).unwrap().remove(0).verb else {
        panic!("{text}")
    };
    let known = tables_to_know(&catalogue(), MARIA, &statement, parameters);
    let kinds = known.into_iter().map(|table| (table, kinds.clone())).collect();
    let context = Context { kinds, ..context(MARIA, RR) };
    let plan = plan(&catalogue(), &statement, parameters, &context);
    let part = |plan: Plan| plan.parts.into_iter().next().unwrap().text;
    plan.map(part).map_err(|refusal| refusal.sqlstate)
}

#[test]
fn bytes_of_mysql_s_clients_are_what_their_column_is_at_postgresql() {
    for (written, told) in [
        ("n = 0x31", "n = 49"),
        ("n = 0xF", "n = 15"),
        ("n = n + 0x31", "n = n + 49"),
        ("n = b'1000001'", "n = 65"),
        ("s = 0x4142", "s = 'AB'"),
        ("s = x'4142'", "s = 'AB'"),
        ("s = _binary'abc'", "s = 'abc'"),
        ("s = b'1000001'", "s = 'A'"),
        ("s = TRUE", "s = '1'"),
        ("s = concat(s, TRUE)", "s = concat(s, 1)"),
        ("data = 0x4142", r"data = CAST('\x4142' AS BYTEA)"),
        ("data = b'1000001'", r"data = CAST('\x41' AS BYTEA)"),
    ] {
        let found = bytes_told(&format!("UPDATE currencies SET {written} WHERE id = 1"), &[]);
        assert_eq!(found, Ok(format!("UPDATE currencies SET {told} WHERE id = 1")));
    }
    for (written, sqlstate) in [
        ("s = 0xff", "22021"),
        ("n = 0x313233343536373839", "22003"),
        ("s = concat(s, 0x41)", "0A000"),
        ("s = CASE WHEN id = 1 THEN x'41' END", "0A000"),
    ] {
        let found = bytes_told(&format!("UPDATE currencies SET {written} WHERE id = 1"), &[]);
        assert_eq!(found, Err(sqlstate), "{written}");
    }
    let found = bytes_told(
        "INSERT INTO currencies (id, s) VALUES (0x1, ?)",
        &[Value::Bytes(b"ab".to_vec())],
    );
    assert!(found.as_ref().is_ok_and(|text| text.ends_with("VALUES (1, 'ab')")), "{found:?}");
    let found = bytes_told("SELECT id FROM currencies WHERE n = 0x31 AND s IN (0x41, 'b')", &[]);
    assert!(
        found.as_ref().is_ok_and(|text| text.contains("n = 49 AND s IN ('A', 'b')")),
        "{found:?}"
    );
}

#[test]
fn numbers_in_hexadecimal_digits_stay_as_written_for_mariadb() {
    for text in [
        "SELECT id FROM audit WHERE n = 0x31 AND s = X'31'",
        "SELECT 0x31 + 0 FROM audit WHERE id = 1",
    ] {
        assert_eq!(planned(text, MARIA, RR, &[]).unwrap().parts[0].text, text);
    }
}

#[test]
fn constants_of_postgresql_s_types_are_constants_at_mariadb() {
    let told = |text: &str| {
        let plan = planned(text, PG, RR, &[]);
        plan.map(|plan| plan.parts[0].text.clone()).map_err(|refusal| refusal.sqlstate)
    };
    for (written, constant) in [
        ("'A0EEBC999C0B4EF8BB6D6BB9BD380A11'::uuid", "'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'"),
        ("CAST('10:00' AS time)", "CAST('10:00:00' AS TIME(6))"),
        ("'10:00:01.5'::time", "CAST('10:00:01.5' AS TIME(6))"),
        (r#"'{"a": 1}'::jsonb"#, r#"'{"a": 1}'"#),
    ] {
        let text = told(&format!("UPDATE audit SET note = {written} WHERE id = 1"));
        assert_eq!(text, Ok(format!("UPDATE audit SET note = {constant} WHERE id = 1")));
    }
    for written in ["note = '10 PM'::time", "note = '{}'::jsonb", "note = '1 day'::interval"] {
        assert_eq!(
            told(&format!("SELECT id FROM audit WHERE {written}")),
            Err("0A000"),
            "{written}"
        );
    }
}

#[test]
fn the_collation_of_bytes_has_another_name_at_mariadb() {
    let plan = planned("SELECT id FROM audit WHERE note COLLATE \"C\" = 'a'", PG, RR, &[]).unwrap();
    assert_eq!(
        plan.parts[0].text,
        "SELECT id FROM audit WHERE CONVERT(note USING utf8mb4) COLLATE utf8mb4_nopad_bin = 'a'"
    );
}

#[test]
fn uuids_of_both_kinds_of_sources_are_ordered_alike() {
    let kinds = vec![("id".to_owned(), Kind::Int4), ("owner".to_owned(), Kind::Uuid)];
    let context =
        Context { kinds: Kinds::from([("accounts".to_owned(), kinds)]), ..context(PG, RR) };
    let text = "SELECT id FROM accounts ORDER BY owner";
    let Verb::Data(statement) = parse(text, PG).unwrap().remove(0).verb else { panic!("{text}") };
    let plan = plan(&catalogue(), &statement, &[], &context).unwrap();
    assert!(plan.parts[0].text.ends_with("ORDER BY owner"), "{}", plan.parts[0].text);
    assert!(plan.parts[1].text.contains("COLLATE utf8mb4_nopad_bin"), "{}", plan.parts[1].text);
}
