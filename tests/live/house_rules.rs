//! Rules of the source that a compiler does not check, by a plain scan, and what must be `Send` and `Sync`.

use std::fs;
use std::path::{Path, PathBuf};

use standin::{
    Admission, LiveEngine, LiveEngineBuilder, LiveRequest, LiveRequestRegistration, OutputSignal, Refused,
    ShutdownError, StartError, SubmitError,
};

fn sources(folder: &Path) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("the source is there") {
        let path = entry.expect("readable").path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).expect("readable");
            found.push((path, text));
        }
    }
    found
}

fn src() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

#[test]
fn r39_every_select_is_biased() {
    let mut selects = 0;
    for (path, text) in sources(&src()) {
        for after in text.split("select!").skip(1) {
            selects += 1;
            let body = after.trim_start().trim_start_matches('{').trim_start();
            assert!(body.starts_with("biased;"), "{}: an unbiased select", path.display());
        }
    }
    assert!(selects >= 3, "{selects} found");
}

#[test]
fn the_pure_places_name_no_runtime_clock_lock_or_thread() {
    let banned = [
        "tokio",
        "std::time::Instant",
        "SystemTime",
        "dashmap",
        "DashMap",
        "std::thread",
        "Mutex",
        "RwLock",
        "mpsc",
        "async fn",
        "tracing",
    ];
    let pure = ["scheduler", "kv", "timing", "replay", "handoff"];
    let plain = ["config", "request", "output", "metrics", "kv_event", "time", "error"];
    let mut files: Vec<_> = pure.iter().flat_map(|folder| sources(&src().join(folder))).collect();
    for name in plain {
        let path = src().join(name).with_extension("rs");
        let text = fs::read_to_string(&path).expect("the source is there");
        files.push((path, text));
    }
    assert!(files.len() > 20, "{} files", files.len());
    for (path, text) in files {
        for (line, code) in text.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//")) {
            for word in banned {
                assert!(!code.contains(word), "{}:{}: {word}", path.display(), line + 1);
            }
        }
    }
}

#[test]
fn only_one_file_reads_a_clock() {
    for (path, text) in sources(&src()) {
        if !path.ends_with("live/clock.rs") {
            assert!(!text.contains("Instant::now()"), "{}", path.display());
        }
    }
}

#[test]
fn r44_every_public_async_function_says_whether_it_is_cancel_safe() {
    let mut functions = 0;
    for (path, text) in sources(&src()) {
        let lines: Vec<&str> = text.lines().collect();
        for (index, line) in lines.iter().enumerate().filter(|(_, line)| line.trim_start().starts_with("pub async fn"))
        {
            functions += 1;
            let docs = lines[..index].iter().rev().take_while(|line| line.trim_start().starts_with(['/', '#']));
            let documented = docs.into_iter().any(|line| line.contains("# Cancel safety"));
            assert!(documented, "{}: {}", path.display(), line.trim());
        }
    }
    assert!(functions >= 9, "{functions} found");
}

#[test]
fn handles_and_values_cross_threads() {
    fn send_and_sync<T: Send + Sync + 'static>() {}
    fn send<T: Send>(_: T) {}
    send_and_sync::<LiveEngine>();
    send_and_sync::<LiveRequest>();
    send_and_sync::<LiveRequestRegistration>();
    send_and_sync::<Admission>();
    send_and_sync::<OutputSignal>();
    send_and_sync::<(StartError, SubmitError, ShutdownError, Refused<SubmitError>)>();
    send(None::<LiveEngineBuilder>);
    // Every future of the engine may be spawned on a multi-threaded runtime.
    let futures = |engine: LiveEngine, mut request: LiveRequest, registration: LiveRequestRegistration| async move {
        let _ = request.recv().await;
        drop(request.cancel().await);
        drop(engine.submit_prepared(registration).await);
        drop(engine.submit(standin::Request::new(vec![1], 1)).await);
        drop(engine.cancel(request.id()).await);
        drop(engine.shutdown().await);
    };
    fn returns_send<A, B, C, F: Future + Send>(_: impl Fn(A, B, C) -> F) {}
    returns_send(futures);
}
