//! Descriptions of devices for container runtimes (CDI), written just before a container starts:
//! only then it is known which GPUs it was assigned. The kubelet was given the name before.

use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;

const KIND: &str = "roommate.dev/place";
/// Variables whose values are folders or files that the container has to see at the same path.
const PATHS: [&str; 4] =
    ["CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "LD_PRELOAD", "ROOMMATE_GATE"];

/// The name of the device of these places.
pub(super) fn device(name: &str) -> String {
    format!("{KIND}={name}")
}

/// Describes the device of a container that is about to start.
pub(super) fn write(folder: &Path, name: &str, env: &BTreeMap<String, String>) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let file = folder.join(format!("roommate.dev-place-{name}.json"));
    let beside = folder.join(format!(".roommate.dev-place-{name}"));
    fs::write(&beside, serde_json::to_vec_pretty(&description(name, env))?)?;
    fs::rename(beside, file)
}

fn description(name: &str, env: &BTreeMap<String, String>) -> Value {
    let mut variables: Vec<String> = env.iter().map(|(n, v)| format!("{n}={v}")).collect();
    if let Some(gpus) = env.get("CUDA_VISIBLE_DEVICES") {
        // NVIDIA's runtime adds the device nodes and the driver's libraries.
        variables.push(format!("NVIDIA_VISIBLE_DEVICES={gpus}"));
        variables.push("NVIDIA_DRIVER_CAPABILITIES=compute,utility".into());
    }
    let seen: BTreeSet<&str> = PATHS
        .iter()
        .filter_map(|name| env.get(*name).map(String::as_str))
        .filter(|path| path.starts_with('/') && Path::new(path).exists())
        .collect();
    let mount =
        |path: &&str| json!({"hostPath": path, "containerPath": path, "options": ["rbind", "rw"]});
    let mut mounts: Vec<Value> = seen.iter().map(mount).collect();
    if env.contains_key("CUDA_MPS_PIPE_DIRECTORY") {
        // Clients of MPS and its server share memory.
        mounts.push(mount(&"/dev/shm"));
    }
    json!({
        "cdiVersion": "0.5.0", "kind": KIND,
        "devices": [{"name": name, "containerEdits": {"env": variables, "mounts": mounts}}],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_leads_to_the_assigned_gpus() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().display().to_string();
        let env: BTreeMap<String, String> = [
            ("CUDA_VISIBLE_DEVICES".to_string(), "GPU-1".to_string()),
            ("CUDA_MPS_PIPE_DIRECTORY".to_string(), pipe.clone()),
            ("LD_PRELOAD".to_string(), "/not/there.so".to_string()),
        ]
        .into();
        write(folder.path(), "ab", &env).unwrap();
        let text = fs::read(folder.path().join("roommate.dev-place-ab.json")).unwrap();
        let read: Value = serde_json::from_slice(&text).unwrap();
        let edits = &read["devices"][0]["containerEdits"];
        assert_eq!(device("ab"), "roommate.dev/place=ab");
        let has = |text: &str| edits["env"].as_array().unwrap().iter().any(|e| e == text);
        assert!(has("CUDA_VISIBLE_DEVICES=GPU-1") && has("NVIDIA_VISIBLE_DEVICES=GPU-1"));
        let at: Vec<&str> = edits["mounts"]
            .as_array()
            .unwrap()
            .iter()
            .map(|m| m["hostPath"].as_str().unwrap())
            .collect();
        assert_eq!(at, [pipe.as_str(), "/dev/shm"]);
    }
}
