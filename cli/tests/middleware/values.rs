//! Values that PostgreSQL and MariaDB write in different ways.

use std::io::Write as _;
use std::process::Stdio;

use orthodrome_geotp::sql::Dialect;

use crate::rig::{Rig, all_of, rig, said};
use crate::sessions::Talk;

/// A proxy whose accounts have bytes, a text and a boolean.
fn start(rig: &mut Rig) {
    rig.start_bank(&[0, 1], false);
    for (place, types) in
        [(0, ["bytea", "text", "boolean"]), (1, ["longblob", "longtext", "boolean"])]
    {
        let [data, note, is_open] = types;
        let text = format!(
            "ALTER TABLE accounts ADD COLUMN data {data}, ADD COLUMN note {note}, ADD COLUMN is_open {is_open}"
        );
        said(&text, rig.servers[place].login());
    }
}

/// The values of a row at its source.
fn kept(rig: &Rig, id: u32) -> String {
    let (place, text) = match id {
        ..100 => (0, "SELECT encode(data, 'hex'), note, is_open::int"),
        _ => (1, "SELECT lower(hex(data)), note, is_open"),
    };
    let text = format!("{text} FROM accounts WHERE id = {id}");
    said(&text, rig.servers[place].login()).replace('\t', "|").replace("\\\\", "\\")
}

#[test]
fn constants_without_a_type_mean_the_same_at_every_source() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    start(rig);
    let mut talk = Talk::begin(rig, Dialect::PostgreSql);
    for id in [1, 101] {
        let of = format!("WHERE id = {id}");
        talk.does(&format!(
            r"UPDATE accounts SET data = '\xdead', note = '\xdead', is_open = 't' {of}"
        ));
        assert_eq!(kept(rig, id), r"dead|\xdead|1");
        talk.does(&format!("UPDATE accounts SET data = 'a', note = 'f', is_open = 'false' {of}"));
        assert_eq!(kept(rig, id), "61|f|0");
        for (condition, count) in [
            (r"data = '\x61'", "1"),
            (r"data = '\x62'", "0"),
            ("is_open = 'f'", "1"),
            ("is_open = 'on'", "0"),
            ("note = 'f'", "1"),
        ] {
            let text = format!("SELECT count(*) FROM accounts {of} AND {condition}");
            assert_eq!(talk.shows(&text), count, "{id}: {condition}");
        }
        let new = id + 30;
        talk.does(&format!(
            r"INSERT INTO accounts (id, balance, data, note, is_open) VALUES ({new}, 0, '\x00ff', 'yes', 'yes')"
        ));
        assert_eq!(kept(rig, new), "00ff|yes|1");
        talk.does(&format!("DELETE FROM accounts WHERE id = {new}"));
    }
    let copied = "31\t0\t\\\\x0102\tt\tt\n131\t0\t\\\\x0102\tt\tt\n32\t0\t\\N\ta\tfalse\n132\t0\t\\N\ta\tfalse\n";
    let mut psql = rig.psql_by("");
    psql.args(["-c", "COPY accounts (id, balance, data, note, is_open) FROM STDIN"]);
    let mut copying = psql.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    copying.stdin.take().unwrap().write_all(copied.as_bytes()).unwrap();
    let output = copying.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", all_of(&output));
    // The sources carry out what is decided a moment later.
    rig.finish();
    for id in [31, 131] {
        assert_eq!(kept(rig, id), "0102|t|1");
    }
    for id in [32, 132] {
        assert!(kept(rig, id).ends_with("|a|0"), "{}", kept(rig, id));
    }
    talk.does("DELETE FROM accounts WHERE balance = 0");
}

#[test]
fn what_is_true_or_false_is_so_in_rows_of_both_kinds_of_sources() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    start(rig);
    let mut postgres = Talk::begin(rig, Dialect::PostgreSql);
    postgres.does("UPDATE accounts SET is_open = (id IN (1, 101))");
    let mut maria = Talk::begin(rig, Dialect::MariaDb);
    for what in ["id IN (1, 101)", "is_open"] {
        let text =
            format!("SELECT {what} AS it FROM accounts WHERE id IN (1, 2, 101, 102) ORDER BY id");
        for (talk, yes, no) in [(&mut postgres, "t", "f"), (&mut maria, "1", "0")] {
            let answer = talk.text(&text).unwrap().remove(0);
            let cells: Vec<String> = answer
                .rows
                .iter()
                .map(|row| String::from_utf8_lossy(row[0].as_ref().unwrap()).into_owned())
                .collect();
            assert_eq!(cells, [yes, no, yes, no], "{what}");
            if yes == "t" {
                assert_eq!(answer.columns[0].oid, 16, "{what}");
            }
        }
        let grouped = format!("SELECT {what} AS it, count(*) FROM accounts GROUP BY {what}");
        assert_eq!(postgres.text(&grouped).unwrap()[0].rows.len(), 2, "{what}");
    }
}

#[test]
fn a_client_sees_its_own_order_of_nulls_at_every_source() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    start(rig);
    let mut postgres = Talk::begin(rig, Dialect::PostgreSql);
    let mut maria = Talk::begin(rig, Dialect::MariaDb);
    postgres.does("UPDATE accounts SET note = 'n' WHERE id IN (1, 101)");
    postgres.does("UPDATE accounts SET note = NULL WHERE id IN (2, 102)");
    for of in ["id IN (1, 2)", "id IN (101, 102)", "id IN (1, 2, 101, 102)"] {
        for (talk, is_first) in [(&mut postgres, false), (&mut maria, true)] {
            for (query, is_descending) in [
                ("SELECT note FROM accounts WHERE {} ORDER BY 1", false),
                ("SELECT note FROM accounts WHERE {} ORDER BY 1 DESC", true),
                ("SELECT DISTINCT note FROM accounts WHERE {} ORDER BY note DESC", true),
                ("SELECT note AS n FROM accounts WHERE {} ORDER BY n", false),
                ("SELECT note, max(id) FROM accounts WHERE {} GROUP BY note ORDER BY note", false),
                ("SELECT max(note) AS m FROM accounts WHERE {} GROUP BY id ORDER BY m", false),
            ] {
                let text = format!("{} LIMIT 1", query.replace("{}", of));
                let wanted = if is_first == is_descending { "n" } else { "NULL" };
                assert_eq!(talk.shows(&text), wanted, "{text}");
            }
        }
        if !of.contains("1, 2, 101") {
            let query = format!(
                "SELECT row_number() OVER (ORDER BY note) FROM accounts WHERE {of} ORDER BY id LIMIT 1"
            );
            assert_eq!((postgres.shows(&query), maria.shows(&query)), ("1".into(), "2".into()));
        }
    }
}

#[test]
fn times_of_both_kinds_of_sources_are_one_group() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    start(rig);
    let mut talk = Talk::begin(rig, Dialect::PostgreSql);
    talk.does("ALTER TABLE accounts ADD COLUMN at timestamp");
    talk.does("UPDATE accounts SET at = '2024-01-01 00:00:00' WHERE id IN (1, 101)");
    talk.does("UPDATE accounts SET at = '2024-01-01 00:00:00.5' WHERE id IN (2, 102)");
    let some = "FROM accounts WHERE id IN (1, 2, 101, 102)";
    for text in [
        format!("SELECT at, count(*) {some} GROUP BY at ORDER BY at"),
        format!("SELECT DISTINCT at, 2 {some} ORDER BY at"),
    ] {
        let rows = rig.psql(&text);
        assert_eq!(rows, "2024-01-01 00:00:00|2\n2024-01-01 00:00:00.5|2", "{text}");
    }
    assert_eq!(rig.psql("SELECT at FROM accounts WHERE id = 101"), "2024-01-01 00:00:00");
}
