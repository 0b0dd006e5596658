//! The manifests for Kubernetes: what the Helm chart makes of its values, and whether the program
//! accepts the arguments and the files in them.

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    missing_docs,
    reason = "tests may panic, and are their own documentation"
)]

mod processes;
#[path = "middleware/tools.rs"]
mod tools;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use processes::{run, text};
use serde_json::Value;
use tools::{is_here, skipped};

fn operations() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("operations")
}

/// The manifests of the chart with its own values, which the repository contains.
fn committed() -> String {
    fs::read_to_string(operations().join("kubernetes/orthodrome.yaml")).unwrap()
}

/// The objects of a file with several.
fn objects(manifests: &str) -> Vec<Value> {
    let objects: Vec<Value> = serde_saphyr::from_multiple(manifests).unwrap();
    assert!(objects.len() > 5, "only {} objects found: is the search broken?", objects.len());
    for object in &objects {
        for field in ["apiVersion", "kind"] {
            assert!(object[field].is_string(), "no {field}: {object}");
        }
        assert!(object["metadata"]["name"].is_string(), "no name: {object}");
    }
    objects
}

fn of_kind<'a>(objects: &'a [Value], kind: &str) -> Vec<&'a Value> {
    objects.iter().filter(|object| object["kind"] == kind).collect()
}

/// Fails unless the program accepts what every pod runs: its arguments, and the file for it.
fn check(manifests: &str, regions: usize) {
    let objects = objects(manifests);
    let [files] = of_kind(&objects, "ConfigMap")[..] else { panic!("not one ConfigMap") };
    let files = files["data"].as_object().unwrap();
    // What an operator makes for the two secrets.
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().join("planet");
    let init = ["serve", "--init", dir.to_str().unwrap(), "--cluster", "planet", "--tls"];
    let hosts = ["--topology", "ec2-3", "--servers-per-region", "2", "--host", "orthodrome.svc"];
    let made = run(&[&init[..], &hosts].concat());
    assert_eq!(made.status.code(), Some(0), "{}", text(&made.stderr));
    fs::create_dir(dir.join("nodes")).unwrap();
    fs::create_dir(dir.join("tokens")).unwrap();
    fs::rename(dir.join("admin.token"), dir.join("tokens/admin.token")).unwrap();
    let place = dir.to_str().unwrap();
    for (name, content) in files {
        let content = content.as_str().unwrap().replace("/etc/orthodrome", place);
        fs::write(dir.join("nodes").join(name), content).unwrap();
    }

    let sets = of_kind(&objects, "StatefulSet");
    assert_eq!(sets.len(), regions, "one StatefulSet for each region");
    let mut pods = 0;
    for set in sets {
        let (name, spec) = (set["metadata"]["name"].as_str().unwrap(), &set["spec"]);
        let template = &spec["template"];
        let wanted = spec["selector"]["matchLabels"].as_object().unwrap();
        let labels = template["metadata"]["labels"].as_object().unwrap();
        assert!(wanted.iter().all(|(label, value)| labels[label] == *value), "{name}: {labels:?}");
        let container = &template["spec"]["containers"][0];
        assert_eq!(container["command"][0], "orthodrome");
        for probe in ["startupProbe", "readinessProbe", "livenessProbe"] {
            let get = &container[probe]["httpGet"];
            assert!(
                ["/livez", "/readyz"].contains(&get["path"].as_str().unwrap()),
                "{name}: {get}"
            );
            let port = container["ports"].as_array().unwrap();
            let port = port.iter().find(|port| port["name"] == get["port"]).unwrap();
            assert_eq!(port["containerPort"], 7400, "{name}");
        }
        for mount in container["volumeMounts"].as_array().unwrap() {
            let volumes = template["spec"]["volumes"].as_array().unwrap();
            let claims = spec["volumeClaimTemplates"].as_array().unwrap();
            let has = |named: &Value| named["name"] == mount["name"];
            let found =
                volumes.iter().any(has) || claims.iter().any(|claim| has(&claim["metadata"]));
            assert!(found, "{name}: no volume {}", mount["name"]);
        }
        for ordinal in 0..spec["replicas"].as_u64().unwrap() {
            let pod = format!("{name}-{ordinal}");
            let arguments = container["args"].as_array().unwrap().iter().map(|argument| {
                let argument = argument.as_str().unwrap().replace("$(POD_NAME)", &pod);
                argument.replace("/etc/orthodrome", place)
            });
            let arguments: Vec<String> = arguments.chain(["--check".to_owned()]).collect();
            let output = run(&arguments);
            let (said, error) = (text(&output.stdout), text(&output.stderr));
            assert_eq!(output.status.code(), Some(0), "{pod}: {error}");
            // The region of the file is that of the pod.
            let region = labels["orthodrome/region"].as_str().unwrap();
            assert!(said.contains(&format!("region      {region}\n")), "{pod}: {said}");
            assert!(said.contains("TLS         on; clients need a credential"), "{pod}: {said}");
            pods += 1;
        }
    }
    assert_eq!(pods, files.len(), "a file for each pod, and a pod for each file");
}

#[test]
fn the_program_accepts_what_the_manifests_give_it() {
    check(&committed(), 3);
}

fn helm(arguments: &[&str]) -> String {
    let mut helm = Command::new("helm");
    let output = processes::output(helm.args(arguments).current_dir(operations()));
    let said = text(&output.stderr);
    assert!(output.status.success(), "helm {}: {said}", arguments.join(" "));
    text(&output.stdout)
}

/// The beginning of the command that makes the committed manifests.
const TEMPLATE: [&str; 5] =
    ["template", "orthodrome", "helm/orthodrome", "--namespace", "orthodrome"];

#[test]
fn the_manifests_are_those_of_the_chart_and_other_values_work_too() {
    if !is_here("helm", "version") {
        return skipped("helm is not installed (https://helm.sh)");
    }
    helm(&["lint", "--strict", "helm/orthodrome"]);
    assert!(
        helm(&TEMPLATE) == committed(),
        "stale: cd operations; helm {} > kubernetes/orthodrome.yaml",
        TEMPLATE.join(" ")
    );
    let directory = tempfile::tempdir().unwrap();
    let values = directory.path().join("values.yaml");
    let regions = "regions: [{name: Virginia, servers: 1}, {name: Frankfurt, servers: 2}, {name: Seoul, servers: 1}]";
    let more = "newCluster: true\nredisPort: 6379\nlimits: {txns_open_max: 20000}\n";
    fs::write(&values, format!("{regions}\n{more}")).unwrap();
    let other = helm(&[&TEMPLATE[..], &["--values", values.to_str().unwrap()]].concat());
    for part in ["--new-cluster", "listen = \"0.0.0.0:6379\"", "txns_open_max = 20000"] {
        assert!(other.contains(part), "{part} is not in {other}");
    }
    check(&other, 3);
}

#[test]
fn a_wrong_key_in_a_file_is_found() {
    let wrong = committed().replace("    [listen]\n", "    [listens]\n");
    let found = std::panic::catch_unwind(|| check(&wrong, 3)).unwrap_err();
    let message = found.downcast_ref::<String>().unwrap();
    assert!(message.contains("unknown field `listens`"), "{message}");
}
