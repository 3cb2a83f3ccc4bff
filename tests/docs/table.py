"""What happens to each command and snippet of the pages: every one has its line here, by its page and first line."""

from __future__ import annotations

from typing import Final

from tests.docs import given
from tests.docs.how import CLUSTER, GPU, SLURM, SYSTEMD, Elsewhere, How, Never, Run, Shown, Stage

UP: Final = Run(scene="bare", until="turnout scheduler listening on", ends=True)
STATUS: Final = Run(prints=r"my-run +closed")
DOCTOR: Final = Run(prints="0 problems")
DISK: Final = Run(prints=r"fsync +/var/lib/turnout/buffer +ok", before="mkdir -p /var/lib/turnout/buffer")
EXPLAIN: Final = Run(prints="step 1")
REPORT: Final = Run(prints="report: report.html")
DEMO: Final = Run(scene="bare", add="--steps 2 --time-scale 0.01", slow=True, timeout_s=400)
BENCH: Final = Run(scene="bare", slow=True, timeout_s=900)
SIMULATED: Final = Run(scene="bare", add="--steps 3", prints="jit", slow=True, timeout_s=200)
FRESH: Final = Elsewhere("test-newcomer", "tests/docs/test_newcomer.py::test_the_quickstart_works_from_a_fresh_clone")
SECURITY: Final = Elsewhere("test-all", "tests/security/test_page.py::test_the_ten_minutes_of_the_page_work")
GO: Final = Elsewhere("test-clients", "tests/clients_langs/test_pages.py::test_the_page_of_go_works")
CPP: Final = Elsewhere("test-clients", "tests/clients_langs/test_pages.py::test_the_page_of_cpp_works")
TYPESCRIPT: Final = Elsewhere("test-clients", "tests/clients_langs/test_pages.py::test_the_page_of_typescript_works")
PROGRAMS: Final = Elsewhere(
    "test-clients",
    "tests/clients_langs/test_programs.py::test_h57_programs_of_all_languages_survive_restarts_and_agree_with_python",
)
LIVE: Final = Elsewhere(
    "test-clients", "tests/clients_langs/test_programs.py::test_h58_a_clients_own_tests_pass_against_a_live_buffer"
)
INSTALLED: Final = Elsewhere(
    "test-packages",
    "tests/packages/test_packages.py::test_h59_installed_alone_client_and_services_run_the_whole_loop",
)
EXTRAS: Final = Elsewhere("test-packages", "tests/packages/test_packages.py::test_extras_can_be_resolved")
LEARNS: Final = Elsewhere("test-vllm", "tests/vllm/learner/test_learning.py::test_the_shipped_job_learns_its_task")
ON_RAY: Final = Elsewhere(
    "test-ray", "tests/ray_deploy/test_on_ray.py::test_a_deployment_outlives_the_command_that_made_it"
)
BACKUP: Final = Elsewhere("test-all", "tests/deployed/test_backup.py::test_a_copy_of_everything_brings_all_of_it_back")
CHECKPOINT: Final = Elsewhere(
    "test-all", "tests/deployed/test_backup.py::test_a_checkpoint_copied_from_a_running_buffer_brings_a_run_back"
)
ROLLING: Final = Elsewhere(
    "test-all", "tests/deployed/test_rolling.py::test_every_process_is_restarted_in_turn_and_no_step_is_lost"
)
SOAK: Final = Elsewhere("soak", "")
KEPT_HERE: Final = Run(given="import os", change={"mkdtemp()": "mkdtemp(dir=os.getcwd())"})
GRPCURL: Final = Never("grpcurl, which is neither in Debian nor in npm; buf asks the same reflection")
BUF: Final = "node_modules/.bin/buf curl --http2-prior-knowledge --protocol grpc "

TRAINER: Final = Stage(
    change={
        "total_training_steps=150": "total_training_steps=3",
        "hooks.next_step, 151": "hooks.next_step, 4",
        "train_batch_size=64": "train_batch_size=8",
        "next_prompts(64)": "next_prompts(8)",
        "hybrid_gpus=16": "hybrid_gpus=1",
        "standalone_gpus=8": "standalone_gpus=1",
        "mini_batch_size=16": "mini_batch_size=2",
        "mini_batch, 16": "mini_batch, 2",
    },
    given=given.TRAINER,
)
WORKER: Final = Stage(given=given.WORKER)

TABLE: Final[dict[str, dict[str, How]]] = {
    "README.md": {
        "make demo": FRESH,
        "make test": Elsewhere("test", ""),
        "turnout up --data-dir data": UP,
        "turnout up --run R --reference 1:1": Run(
            scene="bare", change={" R ": " my-run "}, until="turnout run my-run: hybrid-0, standalone-0", ends=True
        ),
        "turnout engine register R --agent TARGET": Run(
            change={" R ": " my-run ", "TARGET": given.AGENT}, prints="standalone-9"
        ),
        "turnout status": STATUS,
        "turnout top --run my-run": Run(until="my-run", ends=True),
        "turnout report my-run": Run(prints="report: turnout-report.html"),
        "turnout doctor": DOCTOR,
        "turnout demo --seeds 5 --json": DEMO,
        "turnout demo-vllm": LEARNS,
        "turnout ray up cluster.yaml": ON_RAY,
        "turnout buffer serve --help": Run(prints="--data-dir"),
        "turnout simulate --workload all": SIMULATED,
        "turnout buffer audit --data-dir D": Run(change={" D": f" {given.STOPPED}"}, prints="my-run"),
        "turnout buffer own RUN STORE": Run(
            change={"RUN": "my-run", "STORE": "file:///mnt/shared/payloads"}, until="my-run", ends=True
        ),
        "turnout bench": BENCH,
        "grpcurl -plaintext 127.0.0.1:50051 list": GRPCURL,
        "grpcurl -plaintext 127.0.0.1:50051 describe turnout.buffer.v1.ReplayBuffer.GetSampleableCount": GRPCURL,
        "grpcurl -plaintext 127.0.0.1:50051 turnout.buffer.v1.ReplayBuffer/ListRuns": GRPCURL,
        BUF + "--list-methods http://127.0.0.1:50051": Run(
            prints="turnout.buffer.v1.ReplayBuffer/WaitForSampleable", needs="node_modules"
        ),
        BUF + """-d '{"runId": "my-run"}' http://127.0.0.1:50051/turnout.buffer.v1.ReplayBuffer/CreateRun""": Run(
            change={"my-run": "by-hand"}, prints='"runId": "by-hand"', needs="node_modules"
        ),
        BUF
        + """-d '{"runId": "my-run", "partition": "train", "step": "1"}'"""
        + " http://127.0.0.1:50051/turnout.buffer.v1.ReplayBuffer/GetSampleableCount": Run(
            change={"my-run": "by-hand"}, prints="depth", needs="node_modules"
        ),
    },
    "CONTRIBUTING.md": {
        "make test": Elsewhere("test", ""),
        "make test-vllm": Elsewhere("test-vllm", ""),
        "make test-clients": Elsewhere("test-clients", ""),
        "make test-deploy": Elsewhere("test-deploy", ""),
        "make help": Run(scene="bare", prints="make test "),
    },
    "clients/cpp/README.md": {
        "apt-get install g++ cmake pkg-config libgrpc++-dev libprotobuf-dev protobuf-compiler"
        " protobuf-compiler-grpc": CPP,
        "cmake -S clients/cpp -B clients/cpp/build -DGOOGLEAPIS=DIR": CPP,
        "cmake --build clients/cpp/build": CPP,
        "clients/cpp/build/smoke 127.0.0.1:50051 my-run": CPP,
    },
    "clients/go/README.md": {
        "apt-get install golang-go golang-google-grpc-dev golang-google-protobuf-dev": GO,
        'mkdir -p ~/turnout/src/github.com/turnout-rl && ln -s "$PWD" ~/turnout/src/github.com/turnout-rl/turnout': GO,
        "cd ~/turnout/src/github.com/turnout-rl/turnout/clients/go": GO,
        "GO111MODULE=off GOPATH=~/turnout:/usr/share/gocode go build -o bin/loop ./cmd/loop": GO,
        'link, err := turnout.Dial("trainer-0:50051")': GO,
    },
    "clients/typescript/README.md": {
        "npm install && npm run build": TYPESCRIPT,
        "node dist/example/main.js --run my-run --buffer HOST:PORT --engine HOST:PORT --scheduler HOST:PORT": PROGRAMS,
        "npm test": LIVE,
        'const buffer = new Link("trainer-0:50051");': TYPESCRIPT,
    },
    "clients/python/README.md": {
        "pip install turnout": INSTALLED,
        "setup = TrainerSetup(": TRAINER,
        "worker = RolloutWorker(": WORKER,
        'store = open_store("ray")': Run(
            change={'open_store("ray")': 'open_store("file:///mnt/shared/payloads")'},
            given=given.PAYLOADS,
            then=given.PAYLOADS_THEN,
        ),
        'with BufferClient("trainer-0:50051", ClientOptions(timeouts=Timeouts(call=10))) as buffer:': Run(),
    },
    "docs/api.md": {
        "OpenRun -> LEND                  [register hybrids, update standalone, update hybrid] CompleteLend": Shown(
            "the order of calls"
        )
    },
    "docs/contents.md": {
        ":caption: Start": Shown("the site's contents"),
        ":caption: How to": Shown("the site's contents"),
        ":caption: Engines": Shown("the site's contents"),
        ":caption: Operate": Shown("the site's contents"),
        ":caption: Reference": Shown("the site's contents"),
    },
    "docs/demo.md": {
        "make demo": FRESH,
        "turnout demo --prompts mine.jsonl --events events.jsonl": DEMO,
        "turnout demo --seeds 5 --json > figures.json": DEMO,
        "turnout demo --seeds N --json": Run(
            scene="bare", change={" N ": " 2 "}, add=DEMO.add, prints='"tokens_per_s"', slow=True, timeout_s=300
        ),
        '{"seeds": [{"seed": 0, "off": {"wall_clock_s": ..., "tokens_per_s": ..., ...}, "on": {...}}, ...]}': Shown(
            "output"
        ),
    },
    "docs/doctor.md": {
        "turnout doctor": DOCTOR,
        "turnout doctor --scheduler trainer:50053 --buffer trainer:50051 --engine trainer:50052": DOCTOR,
        "turnout doctor --target rollout-3:50052": Run(prints=r"health +rollout-3:50052 +ok"),
        "turnout doctor --config buffer=/etc/turnout/buffer.yaml": Run(
            change={"/etc/turnout/": ""}, prints=r"settings +buffer +ok +buffer\.yaml"
        ),
    },
    "docs/durability.md": {'8 bytes   "TNCKPT02"': Shown("a file's format")},
    "docs/howto/choose-policy.md": {
        "turnout simulate --workload calibrated --policy off,verl,jit --seeds 3": SIMULATED,
        "turnout simulate --from-verl-metrics run.jsonl --policy off,verl,jit": SIMULATED,
        "turnout simulate --from-run my-run.jsonl --policy off,verl,jit": SIMULATED,
        "turnout explain my-run": EXPLAIN,
        "turnout report my-run -o report.html": REPORT,
    },
    "docs/howto/connect-engine.md": {
        "turnout engine serve --agent --listen 127.0.0.1:50054 --replica standalone-0:standalone"
        " --vllm-config engine.yaml": Run(until="listening on 127.0.0.1:50054", needs="vllm", timeout_s=300),
        "turnout engine register my-run --agent 127.0.0.1:50054": Run(prints="standalone-0", needs="vllm"),
        "turnout engine register my-run --agent trainer-0:50054 --gpu hybrid-0=trainer-0/GPU-5f1c": Run(
            change={":50054": ":50055", "hybrid-0=": "hybrid-7="}, prints="hybrid-7"
        ),
        "turnout engine register my-run --replica r0:standalone --backend vllm-http"
        " --endpoint http://rollout-0:8000": Elsewhere("test-vllm", "tests/vllm/real/test_http.py::server"),
        "turnout engine register my-run --replica r1:standalone --backend sglang-http"
        " --endpoint http://rollout-1:30000": Never(f"a running SGLang, which needs {GPU}"),
    },
    "docs/howto/recover.md": {
        "turnout up --data-dir ./turnout-data": Run(scene="bare", until=UP.until),
        'Path("checkpoint/turnout.json").write_text(hooks.save(step))': Run(scene="bare", given=given.SAVING),
        'manifest = Path("checkpoint/turnout.json").read_text()': Run(scene="bare", given=given.RESUMING),
        "turnout buffer audit --data-dir ./turnout-data/buffer": Run(scene="bare", alone=True, prints="saved"),
    },
    "docs/howto/shadow-verl.md": {
        "+trainer.v1.sampler.sampler_kwargs.policy=shadow:jit": Elsewhere(
            "test-verl", "tests/verl/adapter/test_pages.py::test_the_shadow_of_the_page_is_a_setting"
        ),
        "turnout explain my-run": EXPLAIN,
        "turnout report my-run": Run(prints="report: turnout-report.html"),
    },
    "docs/howto/size-pools.md": {
        "turnout simulate --list": Run(scene="bare", prints="calibrated"),
        "turnout simulate --workload two-one.yaml --policy off,verl,jit --seeds 3 --picture two-one.png": SIMULATED,
        "turnout simulate --workload one-two.yaml --policy off,verl,jit --seeds 3 --picture one-two.png": SIMULATED,
    },
    "docs/howto/worker-in-go.md": {"make test-clients": Elsewhere("test-clients", "")},
    "docs/kubernetes.md": {
        "docker build -f deploy/docker/Dockerfile --target services -t REGISTRY/turnout-services .": Never(CLUSTER),
        "docker build -f deploy/docker/Dockerfile --target agent -t REGISTRY/turnout-agent .": Never(CLUSTER),
        "kubectl create namespace turnout": Never(CLUSTER),
        "kubectl apply -k deploy/kubernetes/example": Never(CLUSTER),
        "deploy/slurm/job.sh python train.py": Never(SLURM),
        "cp deploy/systemd/turnout@.service /etc/systemd/system/": Never(SYSTEMD),
        "systemctl enable --now turnout@buffer turnout@engine turnout@scheduler": Never(SYSTEMD),
    },
    "docs/learner.md": {
        "make demo-vllm": Elsewhere("demo-vllm", ""),
        "turnout demo-vllm --prompts mine.jsonl --events events.jsonl": LEARNS,
        "turnout demo-vllm --json > figures.json": LEARNS,
        '{"seeds": [{"seed": 0, "rewards": [...], "reward_range": [0.0, 1.0], "steps": 32, "lends": 32, "syncs": 33,'
        " ...}]}": Shown("output"),
    },
    "docs/load.md": {
        "turnout bench load": BENCH,
        "turnout bench load --open": BENCH,
        "turnout bench load --seconds 120 --rate 32 --json": BENCH,
    },
    "docs/metrics.md": {
        "turnout buffer serve --metrics-listen 127.0.0.1:9101": Run(
            scene="bare", until="listening on 127.0.0.1:50051", ends=True
        ),
        "scrape_configs:": Elsewhere(
            "test", "tests/observability/test_prometheus.py::test_the_page_shows_what_promtool_accepts"
        ),
    },
    "docs/operations.md": {
        "turnout doctor --data-dir /var/lib/turnout/buffer --data-dir /var/lib/turnout/engine"
        " --data-dir /var/lib/turnout/scheduler": Run(
            prints="0 problems",
            before="mkdir -p /var/lib/turnout/buffer /var/lib/turnout/engine /var/lib/turnout/scheduler",
        ),
        "turnout version": Run(scene="bare", prints="turnout-services"),
        'with SchedulerClient("trainer-0:50053") as scheduler:': ROLLING,
        "systemctl stop turnout@scheduler turnout@engine turnout@buffer": BACKUP,
        "cp -a /var/lib/turnout /backup/all": BACKUP,
        "systemctl start turnout@buffer turnout@engine turnout@scheduler": BACKUP,
        "rm -rf /var/lib/turnout": BACKUP,
        "cp -a /backup/all /var/lib/turnout": BACKUP,
        "turnout buffer audit --data-dir /var/lib/turnout/buffer": BACKUP,
        'with BufferClient("trainer-0:50051") as buffer:': CHECKPOINT,
        "cp -a /var/lib/turnout/buffer/checkpoints /backup/checkpoints": CHECKPOINT,
        "systemctl stop turnout@buffer": CHECKPOINT,
        "rm -rf /var/lib/turnout/buffer": CHECKPOINT,
        "mkdir -p /var/lib/turnout/buffer": CHECKPOINT,
        "cp -a /backup/checkpoints /var/lib/turnout/buffer/checkpoints": CHECKPOINT,
        "systemctl start turnout@buffer": CHECKPOINT,
    },
    "docs/payloads.md": {
        'worker = WorkerSetup("my-run", buffer="trainer-0:50051", engine="trainer-0:50052",'
        ' store="file:///mnt/shared/payloads")': Run(),
        'store = open_store(f"file://{mkdtemp()}")  # or "ray", "transferqueue", "s3://bucket/payloads"': KEPT_HERE,
        'owner = StoreOwner("trainer-0:50051", "my-run", open_store(f"file://{mkdtemp()}"))': KEPT_HERE,
        'parts = pack({"tokens": np.arange(6, dtype=np.int32), "scores": {"reward": np.float32(0.5)}})': Run(),
    },
    "docs/quickstart.md": {
        "make demo": FRESH,
        ".venv/bin/turnout up --run my-run --reference 1:1": Run(
            scene="bare", until="turnout run my-run: hybrid-0, standalone-0", needs="torch"
        ),
        ".venv/bin/python examples/any_worker.py": Run(scene="bare", until="^", needs="torch"),
        ".venv/bin/pip install torch": FRESH,
        ".venv/bin/python examples/any_trainer.py": Run(
            scene="bare", prints=r"step 5 mini-batch 3: reward 0\.", needs="torch", timeout_s=900, slow=True
        ),
        ".venv/bin/turnout status": Run(scene="bare", prints=r"my-run +closed", needs="torch", slow=True),
        ".venv/bin/turnout explain my-run": Run(scene="bare", prints="step 5", needs="torch", slow=True),
        ".venv/bin/turnout report my-run -o report.html": Run(
            scene="bare", prints="report: report.html", needs="torch", slow=True
        ),
    },
    "docs/ray.md": {
        "turnout ray up cluster.yaml": ON_RAY,
        "turnout ray status": ON_RAY,
        "turnout ray down": ON_RAY,
        'deployment = ray.up("cluster.yaml")  # in another process of the cluster: ray.connect("turnout")': ON_RAY,
    },
    "docs/report.md": {
        "turnout report my-run -o report.html": REPORT,
        "turnout report my-run -o report.png": Run(prints="report: report.png"),
        "turnout events my-run > my-run.jsonl": Run(),
        "turnout report --events my-run.jsonl -o report.html": REPORT,
        "turnout demo --report report.html": DEMO,
    },
    "docs/routes.md": {
        "# my_router.py, named in the YAML as `router_class: my_router.Balancer`": Elsewhere(
            "test-verl", "tests/verl/adapter/test_pages.py::test_the_router_of_the_page_is_one"
        )
    },
    "docs/runbook.md": {
        "turnout status": STATUS,
        "turnout doctor": DOCTOR,
        "turnout doctor --data-dir /var/lib/turnout/buffer": DISK,
        "turnout doctor --target NODE:PORT": Run(change={"NODE:PORT": "rollout-3:50052"}, prints="0 problems"),
        "turnout events my-run | grep transition_failed | tail -n 3": Run(code=1),
        "turnout top --run my-run --once": Run(prints="my-run"),
        "turnout explain my-run": EXPLAIN,
        "turnout buffer audit --data-dir /var/lib/turnout/buffer": Run(
            change={"/var/lib/turnout/buffer": given.STOPPED}, prints="my-run"
        ),
        "turnout report my-run -o report.html": REPORT,
    },
    "docs/security.md": {
        'openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days 365 -subj "/CN=turnout"'
        " -keyout ca.key -out ca.pem": SECURITY,
        'openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -subj "/CN=trainer-0"'
        " -keyout server.key -out server.csr": SECURITY,
        r"printf 'subjectAltName=DNS:trainer-0,DNS:localhost,IP:127.0.0.1\n' > server.ext": SECURITY,
        "openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 90 -extfile server.ext"
        " -out server.pem": SECURITY,
        "umask 077": SECURITY,
        "turnout token new --role trainer --run my-run >trainer.token 2>>tokens.yaml": SECURITY,
        "turnout token new --role worker --run my-run >worker.token 2>>tokens.yaml": SECURITY,
        "turnout token new --role operator --all-runs >operator.token 2>>tokens.yaml": SECURITY,
        "turnout token new --role service --all-runs >service.token 2>>tokens.yaml": SECURITY,
        "turnout up --buffer 0.0.0.0:50051 --engine 0.0.0.0:50052 --scheduler 0.0.0.0:50053 --tls-cert server.pem"
        " --tls-key server.key --tokens-file tokens.yaml --peer-ca ca.pem --peer-token-file service.token": SECURITY,
        "turnout status --ca ca.pem --token-file operator.token": SECURITY,
        'security = Security(ca="ca.pem", token_file="worker.token")': Run(given=given.CERTIFICATES),
        r"printf 'authorization: Bearer %s\ncontent-type: application/grpc\nte: trailers\n'"
        ' "$(cat operator.token)" > headers': SECURITY,
        r"printf '\0\0\0\0\0' | curl -sS --http2 --cacert ca.pem -H @headers --data-binary @- -o runs.bin -D -"
        " https://localhost:50053/turnout.scheduler.v1.SwitchScheduler/ListRuns": SECURITY,
        "- {id: worker-3b2875ca, role: worker, run: my-run,"
        " sha256: 18842b3ac78eecbda2494a9891a33aeee27e28958ad4f636e8aa5a1ff95d5d70}": Shown("a file's format"),
    },
    "docs/sglang.md": {
        "python -m sglang.launch_server --model-path MODEL --enable-memory-saver [--enable-weights-cpu-backup]": Never(
            GPU
        )
    },
    "docs/simulator.md": {
        "turnout simulate": SIMULATED,
        "turnout simulate --list": Run(scene="bare", prints="calibrated"),
        "turnout simulate --workload all --policy verl,jit --seeds 5": SIMULATED,
        "turnout simulate --workload mine.yaml --policy jit --oracle --picture gain.png": SIMULATED,
        "turnout simulate --workload all --json > results.jsonl": Run(
            scene="bare", change={"--json": "--json --steps 3"}, slow=True, timeout_s=200
        ),
        "name: mine": Shown("mine.yaml, which commands of this page read"),
        "turnout simulate --workload mine.yaml --from-verl-metrics run.jsonl --policy verl,jit": SIMULATED,
        "turnout events my-run > my-run.jsonl": Run(),
        "turnout simulate --from-run my-run.jsonl --policy verl,jit": SIMULATED,
    },
    "docs/soak.md": {
        "make soak": SOAK,
        "make soak SECONDS=60 SEED=7": SOAK,
        "python -m tests.soak --help": Run(scene="bare", prints="--keep"),
    },
    "docs/traces.md": {
        "pip install 'turnout[otel]' opentelemetry-sdk opentelemetry-exporter-otlp-proto-http": EXTRAS,
        "pip install 'turnout-services[otel]'": EXTRAS,
        "export OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318": Run(scene="bare"),
        "export OTEL_TRACES_SAMPLER=parentbased_traceidratio OTEL_TRACES_SAMPLER_ARG=0.1": Run(scene="bare"),
        "turnout scheduler serve --traces": Run(scene="bare", until="listening on 127.0.0.1:50053", ends=True),
        "provider = TracerProvider()": Run(scene="bare"),
    },
    "docs/verl.md": {
        "export TURNOUT_ENGINE_RAY_ADDRESS=auto TURNOUT_ENGINE_VERL_BALANCER=verl/turnout-balancer": Run(scene="bare"),
        "turnout up --data-dir data": UP,
        "export VERL_USE_EXTERNAL_MODULES=turnout.integrations.verl.plugin": Run(scene="bare"),
        "python -m verl.trainer.main_ppo ... trainer.v1.trainer_mode=turnout"
        " +actor_rollout_ref.rollout.agent.agent_loop_manager_class=turnout.integrations.verl.AgentLoopManager"
        " +trainer.v1.sampler.sampler_kwargs.run_id=my-run"
        " +trainer.v1.sampler.sampler_kwargs.buffer=trainer-0:50051"
        " +trainer.v1.sampler.sampler_kwargs.engine=trainer-0:50052"
        " +trainer.v1.sampler.sampler_kwargs.scheduler=trainer-0:50053"
        " +ray_kwargs.ray_init.runtime_env.env_vars"
        ".VERL_USE_EXTERNAL_MODULES=turnout.integrations.verl.plugin": Elsewhere(
            "test-verl", "tests/verl/adapter/test_pages.py::test_the_settings_of_the_page_are_verls"
        ),
        "trainer.v1.sampler.custom_sampler.path=pkg://turnout.integrations.verl": Elsewhere(
            "test-verl", "tests/verl/adapter/test_pages.py::test_the_settings_of_the_page_are_verls"
        ),
    },
    "docs/vllm.md": {
        "# engine.yaml": Shown("engine.yaml, which the next command reads"),
        "turnout engine serve --agent --listen 127.0.0.1:0 --replica hybrid-0:hybrid --vllm-config engine.yaml": Run(
            scene="bare", until="listening on 127.0.0.1:", ends=True, needs="vllm", timeout_s=300
        ),
        "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-sleep-mode"
        " --worker-extension-cls services.engine.vllm.extension.WorkerExtension": Elsewhere(
            "test-vllm", "tests/vllm/real/test_http.py::server"
        ),
        "async def update_weights(target: WeightTarget) -> Moved:": Run(
            given=given.LEARNER, then=given.LEARNER_THEN, needs="torch"
        ),
    },
}
