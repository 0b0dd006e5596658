//! Queries that no source can answer by itself: the proxy's answers are compared with those of one
//! server that has all rows.

use orthodrome_core::ordered::OrdSet;

use orthodrome_geotp::sql::Dialect;

use crate::rig::{Rig, Setup, rig, said};
use crate::sessions::Talk;

const TABLES: [&str; 3] = ["customers", "orders", "regions"];

/// Rows whose values repeat, are absent, and have no partner in other tables.
fn rows() -> Vec<(&'static str, String)> {
    let customers = (1..=12).map(|id| {
        let region = if id % 5 == 0 { "NULL".to_owned() } else { (id % 4).to_string() };
        format!("({id}, 'name{}''s', {region})", id % 7)
    });
    let orders = (1..=40).map(|id| {
        let customer = if id % 9 == 0 { "NULL".to_owned() } else { (id % 15).to_string() };
        let paid = ["TRUE", "FALSE", "NULL"][id % 3];
        format!(
            "({id}, {customer}, {}.{:02}, '2024-01-{:02}', {paid})",
            id * 7 % 50,
            id,
            id % 28 + 1
        )
    });
    let regions = (1..=5).map(|id| format!("({id}, 'région {id}')"));
    vec![
        ("customers", customers.collect::<Vec<_>>().join(", ")),
        ("orders", orders.collect::<Vec<_>>().join(", ")),
        ("regions", regions.collect::<Vec<_>>().join(", ")),
    ]
}

const DEFINITIONS: [&str; 3] = [
    "customers (id int PRIMARY KEY, name varchar(20), region int)",
    "orders (id int PRIMARY KEY, customer int, total numeric(10,2), day date, paid boolean)",
    "regions (id int PRIMARY KEY, title varchar(20))",
];

/// A proxy over two servers of each kind, with tables that are sharded differently, and one server
/// of each kind that has all rows in tables of other names.
fn start(rig: &mut Rig) {
    for server in &rig.servers {
        for table in TABLES {
            said(&format!("DROP TABLE IF EXISTS {table}"), server.login());
            said(&format!("DROP TABLE IF EXISTS all_{table}"), server.login());
        }
    }
    let tables = "[[tables]]\nname = \"customers\"\n\
         shard = { by = \"hash\", column = \"id\", sources = [\"s0\", \"s1\", \"s2\", \"s3\"] }\n\
         [[tables]]\nname = \"orders\"\n\
         shard = { by = \"hash\", column = \"id\", sources = [\"s3\", \"s2\", \"s0\"] }\n\
         [[tables]]\nname = \"regions\"\nsingle = \"s1\"\n";
    rig.start(Setup { tables: tables.into(), ..Setup::accounts(&[0, 1, 2, 3], false) });
    for definition in DEFINITIONS {
        rig.psql(&format!("CREATE TABLE {definition}"));
        for server in [0, 1] {
            said(&format!("CREATE TABLE all_{definition}"), rig.servers[server].login());
        }
    }
    for (table, rows) in rows() {
        rig.psql(&format!("INSERT INTO {table} VALUES {rows}"));
        for server in [0, 1] {
            said(&format!("INSERT INTO all_{table} VALUES {rows}"), rig.servers[server].login());
        }
    }
}

/// Queries in which `{customers}` and such stand for the tables, in the SQL of both kinds. Each
/// gives its rows in one order.
const QUERIES: [&str; 22] = [
    "SELECT o.id, c.name FROM {orders} o JOIN {customers} c ON c.id = o.customer ORDER BY o.id",
    "SELECT o.id, c.name FROM {orders} o, {customers} c WHERE o.customer = c.id AND o.id = 7",
    "SELECT c.id, o.id, o.total FROM {customers} c LEFT JOIN {orders} o ON o.customer = c.id AND o.paid ORDER BY 1, 2",
    "SELECT c.id FROM {customers} c LEFT JOIN {orders} o ON o.customer = c.id WHERE o.id IS NULL ORDER BY c.id",
    "SELECT c.id, o.id FROM {orders} o RIGHT JOIN {customers} c ON c.id = o.customer ORDER BY 1, 2",
    "SELECT c.id, r.title FROM {customers} c LEFT JOIN {regions} r ON r.id = c.region ORDER BY c.id",
    "SELECT r.id, c.id FROM {regions} r LEFT JOIN {customers} c ON c.region = r.id AND c.id < 4 ORDER BY 1, 2",
    "SELECT o.id, c.name, r.title FROM {orders} o JOIN {customers} c ON c.id = o.customer \
     LEFT JOIN {regions} r ON r.id = c.region WHERE o.total > 20 AND c.id < 9 ORDER BY o.id",
    "SELECT r.id, sum(o.total), count(*) FROM {orders} o JOIN {customers} c ON o.customer = c.id \
     JOIN {regions} r ON r.id = c.region GROUP BY r.id HAVING count(*) > 1 ORDER BY r.id",
    "SELECT count(DISTINCT customer) FROM {orders}",
    "SELECT id FROM {customers} UNION SELECT customer FROM {orders} WHERE customer IS NOT NULL ORDER BY 1",
    "SELECT customer FROM {orders} WHERE customer IS NOT NULL EXCEPT SELECT id FROM {customers} ORDER BY 1",
    "SELECT c.id FROM {customers} c WHERE EXISTS (SELECT 1 FROM {orders} o WHERE o.customer = c.id AND o.paid) ORDER BY 1",
    "SELECT id FROM {orders} WHERE customer IN (SELECT id FROM {customers} WHERE region = 1) ORDER BY id",
    "SELECT id FROM {orders} WHERE customer NOT IN (SELECT id FROM {customers}) ORDER BY id",
    "SELECT a.id, b.id FROM {customers} a JOIN {customers} b ON a.region = b.region AND a.id < b.id ORDER BY 1, 2",
    "WITH best AS (SELECT customer, max(total) AS total FROM {orders} GROUP BY customer) \
     SELECT c.id, b.total FROM best b JOIN {customers} c ON c.id = b.customer ORDER BY c.id",
    "SELECT id, rank() OVER (PARTITION BY customer ORDER BY total DESC) FROM {orders} WHERE customer < 5 ORDER BY id",
    "SELECT day, id FROM {orders} WHERE total > (SELECT avg(total) FROM {orders}) ORDER BY id",
    "SELECT c.id, x.n FROM {customers} c JOIN (SELECT customer, count(*) AS n FROM {orders} GROUP BY customer) x \
     ON x.customer = c.id ORDER BY c.id",
    "SELECT o.id FROM {orders} o JOIN {customers} c ON c.id = o.customer WHERE c.id = 999 ORDER BY o.id",
    "SELECT o.day, c.id FROM {orders} o CROSS JOIN {customers} c WHERE o.id = 3 AND c.name LIKE '%3''s' ORDER BY c.id",
];

/// Queries that MariaDB does not know.
const OF_POSTGRESQL: [&str; 7] = [
    "SELECT c.id, o.id FROM {customers} c FULL JOIN {orders} o ON o.customer = c.id ORDER BY 1, 2",
    "SELECT region, count(*) FILTER (WHERE id > 3) FROM {customers} GROUP BY region ORDER BY 1",
    "SELECT count(*) FILTER (WHERE total > 20), sum(total) FROM {orders}",
    "SELECT DISTINCT ON (customer) customer, id FROM {orders} ORDER BY customer, total DESC, id",
    "SELECT c.id, x.id FROM {customers} c, \
     LATERAL (SELECT id FROM {orders} WHERE customer = c.id ORDER BY total DESC, id LIMIT 1) x ORDER BY 1",
    "SELECT region, count(*) FROM {customers} GROUP BY ROLLUP (region) ORDER BY 1, 2",
    "SELECT title, count(*) FILTER (WHERE id > 1) FROM {regions} GROUP BY GROUPING SETS ((title), ()) ORDER BY 1, 2",
];

fn named(query: &str, prefix: &str) -> String {
    let fill = |text: String, table: &&str| {
        text.replace(&format!("{{{table}}}"), &format!("{prefix}{table}"))
    };
    TABLES.iter().fold(query.to_owned(), fill)
}

#[test]
fn answers_are_those_of_one_server_that_has_all_rows() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    start(rig);
    let mut gathered = OrdSet::new();
    for (number, query) in QUERIES.iter().enumerate() {
        let (through, at_one) = (named(query, ""), named(query, "all_"));
        let expected = said(&at_one, rig.servers[0].login());
        assert_eq!(rig.psql(&through), expected, "PostgreSQL: {through}");
        let expected = said(&at_one, rig.servers[1].login());
        assert_eq!(rig.mysql(&through), expected, "MySQL: {through}");
        if rig.psql(&format!("EXPLAIN {through}")).contains("gathers rows") {
            gathered.insert(number);
        }
    }
    assert!(gathered.len() >= 18, "only {gathered:?} were gathered");
    for query in OF_POSTGRESQL {
        let expected = said(&named(query, "all_"), rig.servers[0].login());
        assert_eq!(rig.psql(&named(query, "")), expected, "{query}");
    }
    // Only rows that may be in the result are read.
    let plan = rig.psql(&format!("EXPLAIN {}", named(QUERIES[1], "")));
    assert!(plan.contains("WHERE (o.id = 7)"), "{plan}");
    rig.finish();
}

#[test]
fn gathered_rows_are_those_of_the_transaction() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    start(rig);
    let join = "SELECT count(*) FROM orders o JOIN customers c ON c.id = o.customer WHERE c.id = 3";
    for kind in [Dialect::PostgreSql, Dialect::MariaDb] {
        let mut client = Talk::begin(rig, kind);
        let before = client.shows(join);
        client.does("BEGIN");
        client.does(
            "INSERT INTO orders (id, customer, total) VALUES (100, 3, 1), (101, 3, 2), (102, 3, 3)",
        );
        let within = client.shows(join);
        assert_eq!(within.parse::<u32>().unwrap(), before.parse::<u32>().unwrap() + 3, "{kind}");
        let mut other = Talk::begin(rig, kind);
        other.does(match kind {
            Dialect::PostgreSql => "SET lock_timeout = '300ms'",
            Dialect::MariaDb => "SET innodb_lock_wait_timeout = 1",
        });
        // What was read stays as it is until the end.
        other.refused("UPDATE customers SET region = 9 WHERE id = 3");
        client.does("ROLLBACK");
        assert_eq!(client.shows(join), before, "{kind}");
        other.does("UPDATE customers SET region = 3 WHERE id = 3");
        // In one query batch with statements before and after it.
        let batch = format!("BEGIN; DELETE FROM orders WHERE id = 3; {join}; ROLLBACK; {join}");
        assert_eq!(client.shows(&batch), before, "{kind}");
    }
    rig.finish();
}

#[test]
fn a_query_that_would_gather_too_much_is_refused() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    start(rig);
    let long = "x".repeat(15);
    let mut client = Talk::begin(rig, Dialect::PostgreSql);
    for start in (0..60_000).step_by(10_000) {
        let rows: Vec<String> =
            (start + 1000..start + 11_000).map(|id| format!("({id}, '{long}', 1)")).collect();
        client.does(&format!("INSERT INTO customers VALUES {}", rows.join(", ")));
    }
    let all = "SELECT count(*) FROM customers c JOIN orders o ON c.region = o.id";
    let few = "SELECT count(*) FROM customers c JOIN orders o ON c.id = o.customer WHERE o.id = 7";
    for (kind, code) in [(Dialect::PostgreSql, "54000"), (Dialect::MariaDb, "1104")] {
        let mut client = Talk::begin(rig, kind);
        assert_eq!(client.refused(all), code, "{kind}");
        // It has locked what it had read until then.
        let mut other = Talk::begin(rig, kind);
        other.does("UPDATE customers SET region = 1 WHERE id = 1000");
        assert_eq!(client.shows(few), "1", "{kind}: the join restricts what is read");
    }
    rig.finish();
}
