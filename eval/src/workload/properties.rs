//! YCSB's property files: the settings of the core workload, as far as they map to transactions.

use orthodrome_core::ordered::OrdMap;

use super::{Description, Goal, Options, WorkloadError};

/// YCSB's constant for `zipfian`.
const ZIPFIAN: f64 = 0.99;

/// The workload that a property file of YCSB's core workload describes: every operation is a
/// transaction of its own. The fields of a record are one value. Settings of YCSB's client
/// (threads, operations, tables, measurements) are ignored.
///
/// # Errors
/// If a setting has no counterpart; the error gives the reason.
pub fn read_properties(text: &str) -> Result<Description, WorkloadError> {
    let mut properties: OrdMap<&str, &str> = OrdMap::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with(['#', '!']) {
            continue;
        }
        let Some((name, value)) = line.split_once(['=', ':']) else {
            let problem = format!("line {number}: {line:?} is not `name=value`");
            return Err(WorkloadError::Syntax(problem));
        };
        properties.insert(name.trim(), value.trim());
    }
    let wrong = |name: &str, problem: &str| {
        let value = properties.get(name).copied().unwrap_or_default();
        WorkloadError::Syntax(format!("{name}={value}: {problem}"))
    };
    let number = |name: &str, default: f64| match properties.get(name).map(|text| text.parse()) {
        None => Ok(default),
        Some(Ok(number)) if (0.0..1e15).contains(&number) => Ok(number),
        Some(_) => Err(wrong(name, "use a number from 0")),
    };
    let reads = number("readproportion", 0.95)?;
    let updates = number("updateproportion", 0.05)?;
    let modifies = number("readmodifywriteproportion", 0.0)?;
    for name in ["insertproportion", "scanproportion"] {
        if number(name, 0.0)? > 0.0 {
            return Err(wrong(
                name,
                "transactions have reads and updates of known records only; leave it out",
            ));
        }
    }
    let zipf = match properties.get("requestdistribution").copied().unwrap_or("uniform") {
        "uniform" => 0.0,
        "zipfian" => number("zipfianconstant", ZIPFIAN)?,
        _ => return Err(wrong("requestdistribution", "use uniform or zipfian")),
    };
    let bytes = number("fieldcount", 10.0)? * number("fieldlength", 100.0)?;
    let records = number("recordcount", 1_000.0)?;
    let mut options = Options {
        keys: Some(records as u64),
        zipf: Some(zipf),
        value_bytes: Some(bytes as u64),
        ..Options::default()
    };
    let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
    let workload = if modifies == 0.0 {
        options.reads = Some(share(reads, reads + updates));
        "ycsb:1"
    } else if updates == 0.0 {
        options.read_only = Some(share(reads, reads + modifies));
        "ycsbt:1"
    } else {
        let problem =
            "a workload has updates or read-modify-writes, not both; set updateproportion to 0";
        return Err(wrong("readmodifywriteproportion", problem));
    };
    if reads + updates + modifies == 0.0 {
        return Err(wrong("readproportion", "the proportions are all 0; use a proportion above 0"));
    }
    Ok(Description {
        workload: workload.into(),
        options,
        origins: OrdMap::new(),
        goal: Goal::default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::parse;

    #[test]
    fn the_core_workloads_have_counterparts() {
        let a = "# Workload A\nrecordcount=5000\nworkload=site.ycsb.workloads.CoreWorkload\nreadallfields=true\n\
                 readproportion=0.5\nupdateproportion=0.5\nscanproportion=0\ninsertproportion=0\n\
                 requestdistribution=zipfian\n";
        let found = read_properties(a).unwrap();
        assert_eq!(found.workload, "ycsb:1");
        let options = &found.options;
        assert_eq!(
            (options.keys, options.zipf, options.reads),
            (Some(5_000), Some(0.99), Some(0.5))
        );
        assert_eq!(options.value_bytes, Some(1_000));
        assert_eq!(parse(&found.workload, options).unwrap().name(), "ycsb:1");
        let f = "readproportion=0.25\nupdateproportion=0\nreadmodifywriteproportion=0.75\nfieldcount: 1\nfieldlength: 32\n";
        let found = read_properties(f).unwrap();
        assert_eq!((&*found.workload, found.options.read_only), ("ycsbt:1", Some(0.25)));
        assert_eq!(found.options.value_bytes, Some(32));
        assert_eq!(parse(&found.workload, &found.options).unwrap().name(), "ycsbt:1");
    }

    #[test]
    fn properties_without_a_counterpart_are_refused_by_name() {
        for (text, expected) in [
            ("scanproportion=0.95", "scanproportion=0.95: "),
            ("insertproportion = 0.05", "insertproportion=0.05: "),
            ("requestdistribution=latest", "requestdistribution=latest: use uniform or zipfian"),
            ("readmodifywriteproportion=0.5", "not both"),
            ("readproportion=many", "readproportion=many: use a number"),
            ("readproportion=0\nupdateproportion=0", "the proportions are all 0"),
            ("what", "line 1: \"what\""),
        ] {
            let error = read_properties(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
