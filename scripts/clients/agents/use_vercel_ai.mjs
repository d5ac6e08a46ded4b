// Vercel's AI SDK against a server, by its provider of what speaks OpenAI's API: text, streams, tools, objects, errors.
import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { APICallError, generateText, jsonSchema, Output, stepCountIs, streamText, tool } from 'ai'
import { ANSWER, DESCRIPTION, PLACE, QUESTION, SCHEMA, checkCalled, checkPlace, getWeather } from './weather.mjs'

const [url, key, mode, file] = process.argv.slice(2)
const given = { name: 'jaxllm', baseURL: `${url}/v1`, supportsStructuredOutputs: true, includeUsage: true }
const provider = createOpenAICompatible({ ...given, apiKey: key })
const settings = { model: provider('model'), maxRetries: 0 }
const tools = {
  get_weather: tool({ description: DESCRIPTION, inputSchema: jsonSchema(SCHEMA), execute: getWeather }),
}

async function checkText() {
  const asked = { ...settings, prompt: 'Hello.', temperature: 0, maxOutputTokens: 24 }
  const whole = await generateText(asked)
  assert.ok(whole.text)
  if (mode === 'replayed') assert.equal(whole.text, 'Hello, how are you?')
  const stream = streamText(asked)
  let streamed = ''
  for await (const piece of stream.textStream) streamed += piece
  assert.equal(streamed, whole.text)
  assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens)
}

async function checkTools() {
  const asked = { ...settings, prompt: QUESTION, tools, maxOutputTokens: 200 }
  if (mode !== 'replayed') {
    const one = { jaxllm: { parallel_tool_calls: false } }
    await generateText({ ...asked, toolChoice: 'required', providerOptions: one })
    checkCalled(mode)
    return
  }
  const whole = await generateText({ ...asked, stopWhen: stepCountIs(3) })
  assert.equal(whole.text, ANSWER)
  assert.equal(whole.steps.length, 2)
  checkCalled(mode)
  const stream = streamText({ ...asked, stopWhen: stepCountIs(3) })
  const kinds = new Set()
  for await (const part of stream.fullStream) kinds.add(part.type)
  for (const kind of ['tool-call', 'tool-result', 'text-delta', 'finish']) assert.ok(kinds.has(kind), kind)
  assert.equal(await stream.text, ANSWER)
  checkCalled(mode)
}

async function checkObjects() {
  const asked = {
    ...settings, prompt: 'Describe a town as JSON.', maxOutputTokens: 400,
    output: Output.object({ schema: jsonSchema(PLACE) }),
  }
  checkPlace((await generateText(asked)).output, mode)
  const stream = streamText(asked)
  let last
  for await (const part of stream.partialOutputStream) last = part
  checkPlace(last, mode)
}

async function checkErrors() {
  const fails = (model, more, status) =>
    assert.rejects(generateText({ model, prompt: 'Hello.', maxRetries: 0, ...more }), (error) => {
      assert.ok(APICallError.isInstance(error), error)
      assert.equal(error.statusCode, status)
      assert.ok(error.message.length > 10, error.message)
      return true
    })
  await fails(provider('other'), {}, 404)
  await fails(provider('model'), { temperature: -1 }, 400)
  await fails(createOpenAICompatible({ ...given, apiKey: 'wrong' })('model'), {}, 401)
}

async function checkPicture() {
  const asked = async (...more) => {
    const content = [...more, { type: 'text', text: 'What is this?' }]
    const messages = [{ role: 'user', content }]
    const { usage } = await generateText({ model: provider('tiny'), messages, maxOutputTokens: 8, maxRetries: 0 })
    assert.ok(usage.outputTokens > 0)
    return usage.inputTokens
  }
  const seen = await asked({ type: 'image', image: readFileSync(file), mediaType: 'image/png' })
  assert.ok(seen > (await asked()) + 1, 'a picture takes several tokens')
}

if (mode === 'pictures') {
  await checkPicture()
} else {
  await checkText()
  await checkTools()
  await checkObjects()
  await checkErrors()
}
